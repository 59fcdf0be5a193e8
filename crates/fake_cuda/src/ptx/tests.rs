use super::{parse, run_block};
use crate::launch::Kernel;
use crate::launch::{Index, Launch};
use crate::random::Random;
use std::sync::Arc;

/// Runs the body of a kernel with one argument, the address of `memory`, in `%rd1`; `%r1` is the number of the thread.
fn run(body: &str, num_threads: u32, memory: &mut [u64]) -> Result<(), String> {
    let text = format!(
        ".visible .entry kernel(\n.param .u64 kernel_param_0\n)\n{{\n.shared .align 16 .b8 tile[1024];\n\
         ld.param.u64 %rd1, [kernel_param_0];\nmov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
    );
    let kernel = parse(&text)?.remove(0);
    let one = Index { x: 1, y: 1, z: 1 };
    let addresses = memory.as_mut_ptr_range();
    let (start, end) = (addresses.start as usize, addresses.end as usize);
    let launch = Launch {
        name: "kernel".to_owned(),
        kernel: Kernel::Ptx(Arc::clone(&kernel)),
        grid: one,
        block: Index { x: num_threads, ..one },
        shared_bytes: 0,
        arguments: vec![vec![start as u128]],
    };
    let has = |first: usize, num_bytes: usize| first >= start && first + num_bytes <= end;
    run_block(&kernel, &launch, Index::default(), &has, &mut Random::new(1))
}

#[test]
fn threads_branch_and_write_their_results() {
    let mut memory = [0; 40];
    let body = "mul.wide.u32 %rd2, %r1, 8;\nadd.s64 %rd2, %rd1, %rd2;\nsetp.gt.u32 %p1, %r1, 3;\n@%p1 bra $L1;\n\
                st.global.u64 [%rd2], 7;\nbra.uni $L2;\n$L1:\ncvt.rn.f32.u32 %f1, %r1;\nfma.rn.f32 %f1, %f1, 0f40000000, 0f3F800000;\n\
                cvt.rzi.u32.f64 %r2, 0d4008000000000000;\nst.global.f32 [%rd2], %f1;\nst.global.u32 [%rd2+4], %r2;\n$L2:";
    run(body, 40, &mut memory).unwrap();
    assert!(memory[..4].iter().all(|&word| word == 7));
    for (index, &word) in memory.iter().enumerate().skip(4) {
        assert_eq!([word as u32, (word >> 32) as u32], [(2.0 * index as f32 + 1.0).to_bits(), 3]);
    }
}

#[test]
fn wrong_addresses_and_unknown_instructions_are_reported() {
    let mut memory = [0; 4];
    for (body, expected) in [
        ("st.global.u32 [%rd1+32], 1;", "beyond the device's memory"),
        ("st.global.u32 [%rd1+2], 1;", "4 bytes at address"),
        ("st.shared.v4.u32 [tile+1024], {%r1, %r1, %r1, %r1};", "of Shared memory"),
        ("st.shared.u32 [tile+6], 1;", "of Shared"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [tile+8];", "of Shared"),
        ("sin.approx.f32 %f1, %f1;", "does not know"),
        ("trap;", "a trap"),
        ("setp.eq.u32 %p1, %r1, 0;\n@%p1 bra $L1;\nbar.sync 0;\n$L1:\nbar.warp.sync -1;", "do not come"),
        ("shfl.sync.idx.b32 %r2|%p1, %r1, 0, 31, 1;", "not in its mask"),
    ] {
        let error = run(body, 32, &mut memory).unwrap_err();
        assert!(error.contains(expected), "{body}: {error}");
    }
}

#[test]
fn lanes_exchange_values() {
    let mut memory = [0; 32];
    let body = "shfl.sync.bfly.b32 %r2|%p1, %r1, 5, 31, -1;\nsetp.lt.u32 %p2, %r1, 3;\n\
                vote.sync.ballot.b32 %r3, %p2, -1;\nmul.wide.u32 %rd2, %r1, 8;\nadd.s64 %rd2, %rd1, %rd2;\n\
                st.global.v2.u32 [%rd2], {%r2, %r3};";
    run(body, 32, &mut memory).unwrap();
    let expected = |lane: u64| (lane ^ 5) | 7 << 32;
    assert!(memory.iter().zip(0..).all(|(&word, lane)| word == expected(lane)), "{memory:?}");
}
