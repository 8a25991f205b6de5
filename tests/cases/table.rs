//! The table of cases in `tests/README.md` is true.

use std::path::Path;

/// Files and tests named in a line: `file.rs::name`, or `file.rs::start*`.
fn tests_in(line: &str) -> impl Iterator<Item = (&str, &str)> {
    line.split('`').filter_map(|piece| piece.split_once("::")).filter(|(file, _)| file.ends_with(".rs"))
}

#[test]
fn the_readme_lists_every_case() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let readme = std::fs::read_to_string(tests.join("README.md")).expect("tests/README.md");
    for number in 1..=74 {
        let start = format!("| A{number:02} |");
        assert_eq!(readme.lines().filter(|line| line.starts_with(&start)).count(), 1, "{start}");
    }
    for line in readme.lines().filter(|line| line.starts_with("| A")) {
        for (file, test) in tests_in(line) {
            let Ok(source) = std::fs::read_to_string(tests.join(file)) else {
                eprintln!("SKIPPED: there is no {file} for {line}");
                continue;
            };
            let function = match test.strip_suffix('*') {
                Some(start) => format!("fn {start}"),
                None => format!("fn {test}("),
            };
            assert!(source.contains(&function), "{file} has no {test}: {line}");
        }
    }
}
