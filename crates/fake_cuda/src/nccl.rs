//! NCCL: only its version.

use crate::Out;
use std::ffi::c_int;

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: Out<'_, c_int>) -> c_int {
    version.write(22_703);
    0
}
