"""Writes onnx_attention.{json,safetensors}: the 93 backend tests of ONNX's operator Attention (opsets 23 to 25), as ONNX's own
package makes them with its reference implementation.

    python3 -m venv /tmp/onnx && /tmp/onnx/bin/pip install onnx==1.23.2
    /tmp/onnx/bin/python tests/data/generate_onnx.py

Every test has a twin `_expanded`, the same inputs and outputs with the operator written as a graph of others: not repeated here.
"""

import json
import pathlib
import struct
import warnings

import onnx
from onnx.backend.test.case.node import collect_testcases

HERE = pathlib.Path(__file__).parent
COUNTS = {23: 69, 24: 13, 25: 11}
# Booleans as bytes, as in the other files here.
TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "bool": "U8"}


def write_safetensors(path, arrays):
    """The format's three parts: length of the header, header in JSON, data."""
    header, offset = {}, 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {"dtype": TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    warnings.simplefilter("ignore")  # The tests contain infinities on purpose.
    cases, arrays, counts = [], {}, dict.fromkeys(COUNTS, 0)
    for test in collect_testcases("Attention"):
        if test.name.endswith("_expanded"):
            continue
        (node,) = test.model.graph.node
        (opset,) = [imported.version for imported in test.model.opset_import if imported.domain == ""]
        ((inputs, outputs),) = test.data_sets
        assert node.op_type == "Attention" and (test.rtol, test.atol) == (1e-3, 1e-7), test.name
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        cases.append({"name": test.name, "opset": opset, "attributes": attributes})
        for names, values in ((node.input, inputs), (node.output, outputs)):
            for name, value in zip(filter(None, names), values, strict=True):
                arrays[f"{test.name}/{name}"] = value
        counts[opset] += 1
    assert counts == COUNTS, counts
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    text = f'{{\n "onnx": "{onnx.__version__}",\n "rtol": 1e-3,\n "atol": 1e-7,\n "cases": [\n{lines}\n ]\n}}\n'
    (HERE / "onnx_attention.json").write_text(text)
    write_safetensors(HERE / "onnx_attention.safetensors", arrays)


if __name__ == "__main__":
    main()
