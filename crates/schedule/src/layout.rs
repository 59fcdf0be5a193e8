//! State layouts: where each class of a rank's state resides between its uses, and how early it is fetched. Lowering passes read a
//! [`StateLayout`]. Executor, validator and planner read the layout in the header of the program.

use crate::action::StateClass;
use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;
use trireme_base::named;

named! {
    /// The portion of a class of state that a data-parallel rank holds.
    #[derive(Default)]
    pub enum Portion {
        /// All of it, on every rank.
        #[default]
        Full = "whole",
        /// The rank's shard.
        Shard = "shard",
        /// No state of the class exists.
        Absent = "none",
    }
}

named! {
    /// The tier of memory in which a class of state resides between its uses.
    #[derive(Default)]
    pub enum Tier {
        /// The device.
        #[default]
        Device = "device",
        /// The host's memory.
        Host = "host",
        /// A disk.
        Disk = "disk",
    }
}

/// The layout of one class of state on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ClassLayout {
    /// The portion that the rank holds.
    pub portion: Portion,
    /// The tier in which that portion resides.
    pub tier: Tier,
}

/// The layout of the state of every unit on the ranks that run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayout {
    /// Parameters. A shard is gathered around each use.
    pub parameters: ClassLayout,
    /// Accumulated gradients. Full gradients are reduced once per step, sharded gradients after each microbatch.
    pub gradients: ClassLayout,
    /// Optimizer state. Includes the weights that the rank updates, unless these are the sharded parameters
    /// ([`class_of_weights`](StateLayout::class_of_weights)). If optimizer state resides off the device, the host runs the updates.
    pub optimizer: ClassLayout,
    /// Activations that forward passes keep for backward; never sharded.
    pub activations: ClassLayout,
    /// The gather of a unit's parameters starts this many passes before the pass that reads them. With 0, parameters are gathered on
    /// demand, and the fewest parameters are held.
    pub gather_ahead: usize,
    /// Whether parameters gathered for forward stay until backward has read them. Saves a gather, but all parameters are held at the same
    /// time.
    pub keep_gathered: bool,
    /// Whether a unit is updated as soon as its gradient is reduced, so that few gradients exist at the same time. Updates then cannot wait
    /// for the norm of all gradients, or for a check that the loss is finite.
    pub updates_early: bool,
    /// The fetch of evicted state starts this many uses of its class before the use that needs it. For activations, passes are counted
    /// instead of uses.
    pub fetch_ahead: usize,
    /// Number of units whose activations are evicted: the first units that [keep](crate::UnitChain::keeps) activations, because theirs wait
    /// longest for backward.
    pub num_offloaded_units: usize,
}

impl Default for StateLayout {
    /// Returns [`StateLayout::UNSHARDED`].
    fn default() -> Self {
        StateLayout::UNSHARDED
    }
}

impl StateLayout {
    /// The layout in which all state is unsharded and on the device.
    pub const UNSHARDED: StateLayout = {
        let here = ClassLayout { portion: Portion::Full, tier: Tier::Device };
        StateLayout {
            parameters: here,
            gradients: here,
            optimizer: here,
            activations: here,
            gather_ahead: 1,
            keep_gathered: false,
            updates_early: false,
            fetch_ahead: 1,
            num_offloaded_units: usize::MAX,
        }
    };

    /// Returns the layout of a stage of ZeRO (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    /// 2020, section 5). Stage 0 shards nothing, stage 1 optimizer state, stage 2 also gradients, stage 3 also parameters.
    ///
    /// # Panics
    /// If `stage` is above 3.
    pub const fn zero(stage: usize) -> StateLayout {
        assert!(stage <= 3, "stages of ZeRO are 0 to 3");
        let mut layout = StateLayout::UNSHARDED;
        if stage >= 1 {
            layout.optimizer.portion = Portion::Shard;
        }
        if stage >= 2 {
            layout.gradients.portion = Portion::Shard;
        }
        if stage >= 3 {
            layout.parameters.portion = Portion::Shard;
        }
        layout
    }

    /// Returns the layout for units that only run forward, without gradients and optimizer state.
    pub fn forward_only(mut self) -> StateLayout {
        let absent = ClassLayout { portion: Portion::Absent, tier: Tier::Device };
        (self.gradients, self.optimizer) = (absent, absent);
        self.updates_early = false;
        self
    }

    /// Returns whether parameters are trained, so that there are gradients.
    pub fn is_trained(&self) -> bool {
        self.gradients.portion != Portion::Absent
    }

    /// Returns the layout of a class.
    pub fn of(mut self, class: StateClass) -> ClassLayout {
        *self.of_mut(class)
    }

    /// Returns a mutable reference to the layout of a class.
    pub fn of_mut(&mut self, class: StateClass) -> &mut ClassLayout {
        match class {
            StateClass::Optimizer => &mut self.optimizer,
            StateClass::Parameters => &mut self.parameters,
            StateClass::Gradients => &mut self.gradients,
            StateClass::Activations => &mut self.activations,
        }
    }

    /// Returns the layout with `class` in `tier`.
    pub fn with_tier(mut self, class: StateClass, tier: Tier) -> Self {
        self.of_mut(class).tier = tier;
        self
    }

    /// Returns whether ranks hold shards of a class.
    pub fn is_sharded(&self, class: StateClass) -> bool {
        self.of(class).portion == Portion::Shard
    }

    /// Returns whether ranks hold shards of any class.
    pub fn has_shards(&self) -> bool {
        StateClass::ALL.iter().any(|&class| self.is_sharded(class))
    }

    /// Returns whether a class resides off the device.
    pub fn is_offloaded(&self, class: StateClass) -> bool {
        self.of(class).tier != Tier::Device
    }

    /// Returns whether programs fetch and evict a class: any state on a disk, and activations in host memory. Other state in host memory is
    /// used there.
    pub fn is_fetched(&self, class: StateClass) -> bool {
        match self.of(class).tier {
            Tier::Device => false,
            Tier::Host => class == StateClass::Activations,
            Tier::Disk => true,
        }
    }

    /// Returns the layout with defaults for the fields that have no effect, so that equal programs have equal layouts.
    pub(crate) fn normalized(self) -> Self {
        let StateLayout { parameters, gradients, optimizer, activations, updates_early, .. } = self;
        let mut layout = StateLayout {
            parameters,
            gradients,
            optimizer,
            activations,
            updates_early,
            ..StateLayout::UNSHARDED
        };
        if self.is_sharded(StateClass::Parameters) {
            (layout.gather_ahead, layout.keep_gathered) = (self.gather_ahead, self.keep_gathered);
        }
        if StateClass::ALL.iter().any(|&class| self.is_fetched(class)) {
            layout.fetch_ahead = self.fetch_ahead;
        }
        if self.is_offloaded(StateClass::Activations) {
            layout.num_offloaded_units = self.num_offloaded_units;
        }
        layout
    }

    /// Returns the class of the weights that a rank updates: `Parameters` if these are sharded, else `Optimizer`, which holds them in
    /// addition to the full parameters.
    pub fn class_of_weights(&self) -> StateClass {
        if self.is_sharded(StateClass::Parameters) { StateClass::Parameters } else { StateClass::Optimizer }
    }

    /// Returns whether a class may reside in `tier`, if a step has `num_microbatches` microbatches. Only shards and activations may leave
    /// the device. Gradients may leave only if optimizer state is sharded, too. They may reside on a disk only with one microbatch per
    /// step, because the gradients of several microbatches are summed in memory.
    pub fn can_reside(&self, class: StateClass, tier: Tier, num_microbatches: usize) -> bool {
        let is_summed = class == StateClass::Gradients && num_microbatches > 1;
        let is_separate = match class {
            StateClass::Activations => true,
            StateClass::Gradients => self.is_sharded(class) && self.is_sharded(StateClass::Optimizer),
            StateClass::Parameters | StateClass::Optimizer => self.is_sharded(class),
        };
        tier == Tier::Device || is_separate && !(is_summed && tier == Tier::Disk)
    }

    /// Returns whether programs exist for the layout, if a step has `num_microbatches` microbatches. A layout that trains has gradients and
    /// optimizer state, and shards optimizer state if it shards parameters. A layout that does not train has neither gradients nor
    /// optimizer state. Parameters and activations must exist, activations must be unsharded, and each class must be able to
    /// [reside](StateLayout::can_reside) in its tier. Early updates need full gradients and a single microbatch: the gradients of several
    /// microbatches are summed in memory.
    pub fn is_possible(&self, num_microbatches: usize) -> bool {
        let can_live = |class| self.can_reside(class, self.of(class).tier, num_microbatches);
        let [parameters, optimizer, activations] =
            [StateClass::Parameters, StateClass::Optimizer, StateClass::Activations]
                .map(|class| self.is_sharded(class));
        let is_absent = |class| self.of(class).portion == Portion::Absent;
        let is_trained = self.is_trained();
        let are_there = !is_absent(StateClass::Parameters) && !is_absent(StateClass::Activations);
        StateClass::ALL.into_iter().all(can_live)
            && (optimizer || !parameters || !is_trained)
            && !activations
            && are_there
            && is_trained != is_absent(StateClass::Optimizer)
            && (!self.updates_early || self.gradients.portion == Portion::Full && num_microbatches == 1)
    }
}

/// Writes the differences from [`StateLayout::UNSHARDED`] as pairs of words, as in the first line of a program.
impl fmt::Display for StateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for class in StateClass::ALL {
            let ClassLayout { portion, tier } = self.of(class);
            match tier {
                Tier::Device if portion == Portion::Full => (),
                Tier::Device => write!(f, " {} {}", class.name(), portion.name())?,
                tier => write!(f, " {} {}@{}", class.name(), portion.name(), tier.name())?,
            }
        }
        let whole = StateLayout::UNSHARDED;
        if self.gather_ahead != whole.gather_ahead {
            write!(f, " gather_ahead {}", self.gather_ahead)?;
        }
        if self.keep_gathered {
            f.write_str(" gathered kept")?;
        }
        if self.updates_early {
            f.write_str(" updates early")?;
        }
        if self.fetch_ahead != whole.fetch_ahead {
            write!(f, " fetch_ahead {}", self.fetch_ahead)?;
        }
        if self.num_offloaded_units != whole.num_offloaded_units {
            write!(f, " moved_units {}", self.num_offloaded_units)?;
        }
        Ok(())
    }
}

impl FromStr for StateLayout {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (pairs, odd) = words.as_chunks::<2>();
        let mut layout = StateLayout::UNSHARDED;
        let read = pairs.iter().try_for_each(|[key, value]| layout.parse_pair(key, value));
        let expected = "pairs such as 'optimizer shard@host'";
        read.filter(|()| odd.is_empty())
            .map(|()| layout)
            .ok_or_else(|| ParseError(format!("'{text}' is no layout of state; expected {expected}")))
    }
}

impl StateLayout {
    /// Sets the field that a pair of words of the text form describes. Returns `None` if there is no such field or value.
    pub(crate) fn parse_pair(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "gather_ahead" => self.gather_ahead = value.parse().ok()?,
            "gathered" if value == "kept" => self.keep_gathered = true,
            "updates" if value == "early" => self.updates_early = true,
            "fetch_ahead" => self.fetch_ahead = value.parse().ok()?,
            "moved_units" => self.num_offloaded_units = value.parse().ok()?,
            _ => {
                let class = StateClass::named(key)?;
                let (portion, tier) = value.split_once('@').unwrap_or((value, Tier::Device.name()));
                let layout = ClassLayout { portion: Portion::named(portion)?, tier: Tier::named(tier)? };
                *self.of_mut(class) = layout;
            }
        }
        Some(())
    }
}
