use super::finding::Finding;
use super::rust_text::{RustFile, contains_word};

/// The modules that may contain unsafe code. ARCHITECTURE.md states the reason for each.
const PERMITTED: [&str; 9] = [
    "crates/comm/src/transport/link/notifications.rs",
    "crates/comm/src/transport/mpi/",
    "crates/comm/src/transport/shm/",
    "crates/fake_cuda/src/",
    "crates/swap/src/raw/",
    "crates/tensor/src/kernels/",
    "crates/testkit/src/allocations.rs",
    "crates/testkit/src/amx_emulator/",
    "crates/testkit/src/relay/tap.rs",
];

/// Source of the CPU backend. Code that creates a `Cpu` can turn a tensor into a slice.
const BACKEND: [&str; 4] = [
    "crates/tensor/src/device.rs",
    "crates/tensor/src/device/",
    "crates/tensor/src/kernels/",
    // Compares kernels on slices of its own.
    "crates/tensor/src/verification.rs",
];

/// Checks that unsafe code occurs in the permitted modules only, and that only the CPU backend creates a `Cpu`. Clippy checks that comments
/// say why unsafe code is sound.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    let is_permitted = PERMITTED.iter().any(|permitted| file.path.starts_with(permitted));
    let is_backend = BACKEND.iter().any(|backend| file.path.starts_with(backend));
    let mut findings = Vec::new();
    for (index, line) in file.lines.iter().enumerate() {
        let mut refuse = |what: &str, remedy: String| {
            findings.push(Finding::violation(&file.path, index + 1, what, remedy));
        };
        if !is_permitted && ["unsafe", "unsafe_code"].iter().any(|word| contains_word(&line.code, word)) {
            refuse(
                "unsafe code outside of the modules for it",
                format!("find a safe crate, or move it into one of {}", PERMITTED.join(", ")),
            );
        } else if !is_backend && contains_word(&line.code, "Cpu::new") {
            refuse("a processor outside of the CPU backend", "issue a kernel through `Device`".to_owned());
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&RustFile::parse(path, text).unwrap()).iter().map(ToString::to_string).collect()
    }

    const KERNEL: &str = "crates/tensor/src/kernels/cpu/norm.rs";

    #[test]
    fn unsafe_code_elsewhere_is_refused() {
        for text in
            ["unsafe { f() }", "unsafe fn f() {}", "unsafe impl Send for A {}", "#![allow(unsafe_code)]"]
        {
            let found = findings("crates/train/src/trainer.rs", &format!("// SAFETY: it is.\n{text}\n"));
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].starts_with("crates/train/src/trainer.rs:2: "), "{found:?}");
            assert!(findings(KERNEL, &format!("// SAFETY: it is.\n{text}\n")).is_empty(), "{text}");
        }
        assert!(findings("crates/train/src/lib.rs", "// unsafe { }\nlet s = \"unsafe\";").is_empty());
    }

    #[test]
    fn a_processor_elsewhere_is_refused() {
        let text = "let cpu = Cpu::new(threads, features);";
        assert_eq!(findings("crates/tensor/src/tape/mod.rs", text).len(), 1);
        assert!(findings(KERNEL, text).is_empty());
    }
}
