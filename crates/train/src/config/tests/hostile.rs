//! Configs with very many mistakes.

use super::*;

#[test]
fn many_mistakes_are_counted_after_the_first() {
    // Work that is quadratic in the number of mistakes would take a minute.
    let unknown: String = (0..80_000).map(|index| format!("k{index}=1\n")).collect();
    let broken: String = (0..40_000).map(|index| format!("k{index}=\n")).collect();
    for (lines, count) in [(unknown, 80_000), (broken, 40_000)] {
        let error = parse(&format!("{SMALLEST}[training]\n{lines}"), &[]).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[0], format!("{count} mistakes in the config:"));
        assert!(lines[1].starts_with("  configs/try.toml:6: k0="), "{}", lines[1]);
        assert!(lines[20].starts_with("  configs/try.toml:25: k19="), "{}", lines[20]);
        assert_eq!(lines[21..], [format!("  and {} more", count - 20)]);
    }
}
