use super::finding::Finding;
use super::rust_text::{Line, RustFile, contains_word};

/// The modules with unsafe code; ARCHITECTURE.md says why each needs it.
const PERMITTED: [&str; 8] = [
    "crates/comm/src/transport/link/notifications.rs",
    "crates/comm/src/transport/mpi/",
    "crates/comm/src/transport/shm/",
    "crates/swap/src/raw/",
    "crates/tensor/src/kernels/",
    "crates/testkit/src/allocations.rs",
    "crates/testkit/src/amx_emulator/",
    "crates/testkit/src/relay/tap.rs",
];

/// Where the CPU backend is: who makes a processor can turn a tensor into a slice.
const BACKEND: [&str; 4] = [
    "crates/tensor/src/device.rs",
    "crates/tensor/src/device/",
    "crates/tensor/src/kernels/",
    // Kernels that are tried on slices of their own.
    "crates/tensor/src/proof.rs",
];

/// Unsafe code lies in the permitted modules only, and each block and impl says why it is sound. Only the CPU backend makes a processor.
pub(crate) fn check(file: &RustFile) -> Vec<Finding> {
    let is_permitted = PERMITTED.iter().any(|permitted| file.path.starts_with(permitted));
    let is_backend = BACKEND.iter().any(|backend| file.path.starts_with(backend));
    let mut findings = Vec::new();
    for (index, line) in file.lines.iter().enumerate() {
        let mut refuse = |what: &str, remedy: String| {
            findings.push(Finding::refuse(&file.path, index + 1, what, remedy));
        };
        if !is_permitted && ["unsafe", "unsafe_code"].iter().any(|word| contains_word(&line.code, word)) {
            refuse(
                "unsafe code outside of the modules for it",
                format!("find a safe crate, or move it into one of {}", PERMITTED.join(", ")),
            );
        } else if !is_backend && contains_word(&line.code, "Cpu::new") {
            refuse("a processor outside of the CPU backend", "issue a kernel through `Device`".to_owned());
        } else if needs_reason(&line.code) && !has_reason(&file.lines, index) {
            let remedy = "say in a comment '// SAFETY: …' above it why it is sound".to_owned();
            refuse("unsafe code without a reason", remedy);
        }
    }
    findings
}

/// Whether an unsafe block or impl begins here.
fn needs_reason(code: &str) -> bool {
    ["unsafe {", "unsafe impl"].iter().any(|start| contains_word(code, start))
}

/// Whether a comment with the reason stands on the line or above the statement that the line belongs to.
fn has_reason(lines: &[Line], index: usize) -> bool {
    let is_reason = |line: &Line| line.comment.contains("SAFETY:");
    let belongs_to_next = |line: &&Line| {
        let code = line.code.trim();
        match code.chars().next_back() {
            None => !line.comment.is_empty(),
            Some(end) => code.starts_with("#[") || !";{},".contains(end),
        }
    };
    is_reason(&lines[index]) || lines[..index].iter().rev().take_while(belongs_to_next).any(is_reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&RustFile::parse(path, text)).iter().map(ToString::to_string).collect()
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

    #[test]
    fn a_block_without_a_reason_is_refused() {
        let bare = ["let x = unsafe { f() };", "unsafe impl Send for A {}", "// Sound.\nunsafe { f() };"];
        for text in bare {
            assert_eq!(findings(KERNEL, text).len(), 1, "{text}");
        }
        // The reason of one statement is not that of the next.
        assert_eq!(findings(KERNEL, "// SAFETY: a.\nunsafe { f() };\nunsafe { g() };").len(), 1);
        assert_eq!(findings(KERNEL, "// SAFETY: a.\n\nunsafe { f() };").len(), 1);
    }

    #[test]
    fn a_reason_may_stand_above_the_statement() {
        for text in [
            "// SAFETY: a.\nlet x =\n    unsafe { f() };",
            "// SAFETY: a\n// and b.\n#[inline]\nunsafe impl Send for A {}",
            "x,\n// SAFETY: a.\nA => unsafe { f() },",
            "unsafe { f() } // SAFETY: a.",
            "/// # Safety\nunsafe fn f() {}",
        ] {
            assert_eq!(findings(KERNEL, text), [""; 0], "{text}");
        }
    }
}
