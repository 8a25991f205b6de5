//! The table of cases in `tests/README.md` is true.

use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Asserts that what a line names in backquotes is there: `file.rs::name`, `file.rs::start*`, or a group of benches.
fn assert_named_exist(line: &str) {
    for piece in line.split('`').skip(1).step_by(2) {
        let (source, text) = match piece.split_once("::") {
            Some((file, start)) if start.ends_with('*') => (read(&format!("tests/{file}")), format!("fn {start}")),
            Some((file, name)) if file.ends_with(".rs") => (read(&format!("tests/{file}")), format!("fn {name}(")),
            None if piece.starts_with("cases/") => (read("benches/multi_head.rs"), format!("\"{piece}\"")),
            _ => continue,
        };
        assert!(source.contains(text.trim_end_matches('*')), "there is no {piece}: {line}");
    }
}

#[test]
fn the_readme_lists_every_case() {
    let readme = read("tests/README.md");
    for number in 1..=74 {
        let start = format!("| A{number:02} |");
        let lines: Vec<&str> = readme.lines().filter(|line| line.starts_with(&start)).collect();
        assert_eq!(lines.len(), 1, "{start}");
        assert_named_exist(lines[0]);
    }
}
