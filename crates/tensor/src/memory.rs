//! Memory accounting by category.
//!
//! A dry run executes the same code on counting devices, so it predicts all memory that is charged here. Charge memory before touching it,
//! and access it only through methods of the device, which do nothing on a counting device.

use std::sync::atomic::{AtomicUsize, Ordering};
use trireme_base::{Bytes, Category};

const NUM_CATEGORIES: usize = Category::ALL.len();

/// The source of 2 MiB pages, which cause fewer TLB misses than small pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PageSource {
    /// Transparent huge pages, as far as the system provides them; small pages for the rest.
    #[default]
    Transparent,
    /// Only the pool that the host has reserved (`vm.nr_hugepages`).
    Reserved,
}

/// Current and peak number of bytes in use.
#[derive(Debug, Default)]
struct Gauge {
    current: AtomicUsize,
    peak: AtomicUsize,
}

impl Gauge {
    fn add(&self, bytes: usize) {
        let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        self.current.fetch_sub(bytes, Ordering::Relaxed);
    }

    fn usage(&self) -> MemoryUsage {
        MemoryUsage { current: self.current.load(Ordering::Relaxed), peak: self.peak.load(Ordering::Relaxed) }
    }

    fn reset_peak(&self) {
        self.peak.store(self.usage().current, Ordering::Relaxed);
    }
}

/// Current and peak bytes in use, by category and in total, and the budget.
#[derive(Debug, Default)]
pub struct MemoryCounter {
    of_category: [Gauge; NUM_CATEGORIES],
    total: Gauge,
    /// The bytes of each category at the peak of the total.
    at_peak: [AtomicUsize; NUM_CATEGORIES],
    /// The part of the total that is memory of other processes. They count it as well.
    mapped: AtomicUsize,
    peak_own: AtomicUsize,
    /// The part of the total that this process has allocated outside of the device's arena.
    outside: Gauge,
    budget: Option<usize>,
}

/// Memory in use, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// In use now.
    pub current: usize,
    /// Maximum in use since the start or the last [reset](MemoryCounter::reset_peaks) of the peaks.
    pub peak: usize,
}

/// The use of a GPU's memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// The GPU's memory.
    pub total: usize,
    /// Allocated by this device for tensors, in use or not.
    pub own: usize,
    /// Free for any program.
    pub free: usize,
}

impl GpuMemory {
    /// Returns the bytes that tensors may have.
    pub fn available(&self) -> usize {
        self.own + self.free
    }

    /// Returns the bytes that CUDA, NCCL and other programs use.
    pub fn others(&self) -> usize {
        self.total.saturating_sub(self.available())
    }
}

/// A refused allocation that would have exceeded the budget.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{category} grew by {}, which exceeds the device budget of {} by {}; in use: {}{}",
    Bytes(*requested as u64),
    Bytes(*budget as u64),
    Bytes(self.excess() as u64),
    describe(in_use),
    largest_in_words(largest)
)]
#[expect(missing_docs, reason = "the message explains the fields")]
pub struct OverBudget {
    pub category: Category,
    pub requested: usize,
    pub budget: usize,
    /// Bytes that each category holds, in the order of [`Category::ALL`].
    pub in_use: [usize; NUM_CATEGORIES],
    /// Descriptions of the kinds of tensors that use the most memory; empty if they are unknown.
    pub largest: String,
}

impl OverBudget {
    /// Returns the bytes by which the allocation exceeds the budget.
    pub fn excess(&self) -> usize {
        self.in_use.iter().sum::<usize>().saturating_add(self.requested).saturating_sub(self.budget)
    }
}

/// Continues a message about memory with descriptions of the largest tensors.
pub(crate) fn largest_in_words(largest: &str) -> String {
    if largest.is_empty() { String::new() } else { format!("; the largest: {largest}") }
}

/// Formats the bytes of each category for error messages.
pub(crate) fn describe(in_use: &[usize; NUM_CATEGORIES]) -> String {
    let text = |(category, bytes): (Category, &usize)| format!("{category} {}", Bytes(*bytes as u64));
    Category::ALL.into_iter().zip(in_use).map(text).collect::<Vec<_>>().join(", ")
}

impl MemoryCounter {
    /// Creates a counter with nothing in use and a budget in bytes.
    pub(crate) fn new(budget: Option<usize>) -> Self {
        MemoryCounter { budget, ..MemoryCounter::default() }
    }

    /// Returns the maximum total in bytes, if there is one.
    pub fn budget(&self) -> Option<usize> {
        self.budget
    }

    /// Counts `bytes` that the caller is about to allocate for `category`.
    ///
    /// # Errors
    /// If they would exceed the budget; nothing is counted then.
    pub fn charge(&self, category: Category, bytes: usize) -> Result<(), OverBudget> {
        let budget = self.budget.unwrap_or(usize::MAX);
        let within_budget = |current: usize| current.checked_add(bytes).filter(|&total| total <= budget);
        let before = self.total.current.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within_budget);
        let exceeded = |_| OverBudget {
            category,
            requested: bytes,
            budget,
            in_use: self.in_use(),
            largest: String::new(),
        };
        let total = before.map_err(exceeded)? + bytes;
        self.of_category[category as usize].add(bytes);
        let own = total.saturating_sub(self.mapped.load(Ordering::Relaxed));
        self.peak_own.fetch_max(own, Ordering::Relaxed);
        if self.total.peak.fetch_max(total, Ordering::Relaxed) < total {
            self.record_at_peak();
        }
        Ok(())
    }

    fn record_at_peak(&self) {
        for (at_peak, current) in self.at_peak.iter().zip(self.in_use()) {
            at_peak.store(current, Ordering::Relaxed);
        }
    }

    /// Like [`charge`](MemoryCounter::charge), for memory of another process that this process maps.
    ///
    /// # Errors
    /// As [`charge`](MemoryCounter::charge).
    pub fn charge_mapped(&self, category: Category, bytes: usize) -> Result<(), OverBudget> {
        self.mapped.fetch_add(bytes, Ordering::Relaxed);
        let taken = self.charge(category, bytes);
        if taken.is_err() {
            self.mapped.fetch_sub(bytes, Ordering::Relaxed);
        }
        taken
    }

    /// Uncounts `bytes` counted by [`charge_mapped`](MemoryCounter::charge_mapped), after they are unmapped.
    pub fn uncharge_mapped(&self, category: Category, bytes: usize) {
        self.uncharge(category, bytes);
        self.mapped.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Like [`charge`](MemoryCounter::charge), for memory outside of the device's arena, such as buffers of a process group.
    ///
    /// # Errors
    /// As [`charge`](MemoryCounter::charge).
    pub fn charge_outside_arena(&self, category: Category, bytes: usize) -> Result<(), OverBudget> {
        self.charge(category, bytes)?;
        self.outside.add(bytes);
        Ok(())
    }

    /// Uncounts freed `bytes` that [`charge_outside_arena`](MemoryCounter::charge_outside_arena) counted.
    pub fn uncharge_outside_arena(&self, category: Category, bytes: usize) {
        self.outside.subtract(bytes);
        self.uncharge(category, bytes);
    }

    /// Uncounts freed `bytes` of `category`.
    pub fn uncharge(&self, category: Category, bytes: usize) {
        self.of_category[category as usize].subtract(bytes);
        self.total.subtract(bytes);
    }

    /// Returns the usage of one category.
    pub fn usage(&self, category: Category) -> MemoryUsage {
        self.of_category[category as usize].usage()
    }

    /// Returns the usage of all categories together. Its peak is less than the sum of their peaks if they peak at different times.
    pub fn total(&self) -> MemoryUsage {
        self.total.usage()
    }

    /// Like [`total`](MemoryCounter::total), without memory of other processes that this process maps.
    pub fn own(&self) -> MemoryUsage {
        let mapped = self.mapped.load(Ordering::Relaxed);
        let current = self.total().current.saturating_sub(mapped);
        MemoryUsage { current, peak: self.peak_own.load(Ordering::Relaxed) }
    }

    /// Returns the part of [`own`](MemoryCounter::own) that was allocated outside of the device's arena.
    pub fn outside_arena(&self) -> MemoryUsage {
        self.outside.usage()
    }

    /// Returns the bytes of each category at the peak of the total, in the order of [`Category::ALL`].
    pub fn at_peak(&self) -> [usize; NUM_CATEGORIES] {
        std::array::from_fn(|slot| self.at_peak[slot].load(Ordering::Relaxed))
    }

    /// Resets all peaks to the current usage.
    pub fn reset_peaks(&self) {
        let gauges = self.of_category.iter().chain([&self.total, &self.outside]);
        gauges.for_each(Gauge::reset_peak);
        self.peak_own.store(self.own().current, Ordering::Relaxed);
        self.record_at_peak();
    }

    /// Returns the current bytes of each category, in the order of [`Category::ALL`].
    pub(crate) fn in_use(&self) -> [usize; NUM_CATEGORIES] {
        Category::ALL.map(|category| self.usage(category).current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_stay_when_memory_is_freed() {
        let counter = MemoryCounter::new(None);
        counter.charge(Category::Activations, 10).unwrap();
        counter.charge(Category::Activations, 5).unwrap();
        counter.uncharge(Category::Activations, 12);
        counter.charge(Category::Gradients, 1).unwrap();
        assert_eq!(counter.usage(Category::Activations), MemoryUsage { current: 3, peak: 15 });
        assert_eq!(counter.total(), MemoryUsage { current: 4, peak: 15 });
        assert_eq!(counter.at_peak()[Category::Activations as usize], 15);
        counter.charge_mapped(Category::Communication, 20).unwrap();
        assert_eq!((counter.total().peak, counter.own()), (24, MemoryUsage { current: 4, peak: 15 }));
        counter.charge_outside_arena(Category::Gradients, 2).unwrap();
        counter.uncharge_outside_arena(Category::Gradients, 2);
        assert_eq!(counter.outside_arena(), MemoryUsage { current: 0, peak: 2 });
        assert_eq!(counter.usage(Category::Gradients).peak, 3);
        assert_eq!(counter.at_peak()[Category::Activations as usize], 3);
        counter.uncharge_mapped(Category::Communication, 20);
        counter.reset_peaks();
        assert_eq!(counter.own(), MemoryUsage { current: 4, peak: 4 });
        assert_eq!(counter.usage(Category::Activations).peak, 3);
        assert_eq!(counter.total().peak, 4);
    }

    #[test]
    fn allocations_beyond_the_budget_are_refused_and_not_counted() {
        let counter = MemoryCounter::new(Some(4096));
        counter.charge(Category::Parameters, 3072).unwrap();
        let refused = counter.charge(Category::Activations, 2048).unwrap_err();
        assert_eq!((refused.requested, refused.excess()), (2048, 1024));
        assert_eq!(
            refused.to_string(),
            "activations grew by 2.00KiB, which exceeds the device budget of 4.00KiB by 1.00KiB; in use: parameters 3.00KiB, \
             gradients 0B, optimizer 0B, activations 0B, communication 0B"
        );
        assert_eq!(counter.total(), MemoryUsage { current: 3072, peak: 3072 });
        counter.charge(Category::Activations, 1024).unwrap();
    }
}
