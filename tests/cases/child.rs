//! Tests that need a process of their own: what they set is read once, or what they try would end the process.

use std::process::Command;

const CHILD: &str = "POLYHEAD_CASES_CHILD";

/// In this process: runs the test of that path again in a child with these environment variables, and asserts that it
/// passes. In the child: calls `body`.
#[track_caller]
pub(crate) fn run(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let binary = std::env::current_exe().expect("the path of this test");
    let child = Command::new(binary)
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .envs(variables.iter().copied())
        .env(CHILD, "1")
        .env_remove("POLYHEAD_REQUIRE_LEVELS")
        .env_remove("POLYHEAD_TEST_LEVELS")
        .output();
    match child {
        Ok(output) => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
            let passed = output.status.success() && stdout.contains("1 passed");
            assert!(passed, "{test} with {variables:?}: {}\n{stdout}\n{stderr}", output.status);
        }
        // An emulator runs this binary, but its system cannot start another.
        Err(error) => eprintln!("SKIPPED: {test} cannot start a process: {error}"),
    }
}
