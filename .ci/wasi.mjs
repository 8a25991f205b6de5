// Runs a WebAssembly test binary: CARGO_TARGET_WASM32_WASIP1_RUNNER="node --no-warnings .ci/wasi.mjs".
import { readFile } from "node:fs/promises";
import { argv, env, exit } from "node:process";
import { WASI } from "node:wasi";

const [path, ...args] = argv.slice(2);
const wasi = new WASI({ version: "preview1", args: [path, ...args], env, preopens: { "/": "/" }, returnOnExit: true });
const module = await WebAssembly.compile(await readFile(path));
exit(wasi.start(await WebAssembly.instantiate(module, wasi.getImportObject())));
