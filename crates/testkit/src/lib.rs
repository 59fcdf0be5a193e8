//! Test helpers: ranks as threads, oracles, golden files, fault injection.
