//! Copies between the memories of ranks.

/// Minimum bytes of a copy that bypasses the caches. Caches would evict such a long result before it is used, and stores that bypass them
/// need not read the target's lines first.
const STREAM_BYTES_MIN: usize = 8 << 20;

/// Copies bytes. If no cache holds the target, a copy of less than 8 MiB costs three memory accesses per byte, a longer one two.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, num_bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { copy_piece(from, to, num_bytes, num_bytes) };
}

/// Copies one piece of a copy of `total_bytes`.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
pub(super) unsafe fn copy_piece(from: *const u8, to: *mut u8, num_bytes: usize, total_bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if total_bytes >= STREAM_BYTES_MIN {
            stream(from, to, num_bytes);
        } else {
            std::ptr::copy_nonoverlapping(from, to, num_bytes);
        }
    }
}

/// The fallback for processors without stores that bypass the caches.
#[cfg(not(target_arch = "x86_64"))]
use std::ptr::copy_nonoverlapping as stream;

/// Copies with stores that bypass the caches (`movntdq`, which every x86-64 processor has).
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream(from: *const u8, to: *mut u8, num_bytes: usize) {
    use std::arch::x86_64::{
        __m128i, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_stream_si128,
    };
    const LINE: usize = 64;
    /// Bytes from the line that is copied to the line that is prefetched.
    const AHEAD: usize = 16 * LINE;
    let head = to.align_offset(LINE).min(num_bytes);
    let lines_end = head + (num_bytes - head) / LINE * LINE;
    // SAFETY: all offsets are below `num_bytes`, within which the caller allows reads and writes. Stores are aligned to their 16 bytes,
    // because they start at a line of the target. A line that is only prefetched may be anywhere.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for offset in (head..lines_end).step_by(LINE) {
            let (source, target) = (from.add(offset), to.add(offset).cast::<__m128i>());
            _mm_prefetch::<_MM_HINT_T0>(source.wrapping_add(AHEAD).cast());
            let words = [0, 16, 32, 48].map(|word| _mm_loadu_si128(source.add(word).cast()));
            for (index, word) in words.into_iter().enumerate() {
                _mm_stream_si128(target.add(index), word);
            }
        }
        std::ptr::copy_nonoverlapping(from.add(lines_end), to.add(lines_end), num_bytes - lines_end);
        // These stores are not ordered with later ones, such as the arrival at the barrier after which peers read the bytes.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_no_other_changes() {
        let source: Vec<u8> = (0..10_000_u32).map(|index| (index % 251) as u8 + 1).collect();
        for total_bytes in [0, STREAM_BYTES_MIN] {
            for (start, place, len) in
                [(0, 0, 0), (3, 5, 1), (0, 0, 9000), (7, 1, 8191), (1, 63, 64), (2, 64, 130)]
            {
                let mut target = vec![0; 10_000];
                // SAFETY: both ranges are within their vectors, which do not overlap.
                unsafe {
                    copy_piece(
                        source[start..start + len].as_ptr(),
                        target[place..place + len].as_mut_ptr(),
                        len,
                        total_bytes,
                    );
                }
                assert_eq!(target[place..place + len], source[start..start + len]);
                assert!(target[..place].iter().chain(&target[place + len..]).all(|&byte| byte == 0));
            }
        }
    }
}
