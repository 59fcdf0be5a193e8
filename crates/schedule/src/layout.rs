//! Where each class of a rank's state is kept between its uses, and how early it is brought back. Lowering passes read a
//! [`StateLayout`]; executor, validator and planner read the one in the program's outline.

use crate::action::StateClass;
use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;
use trireme_base::named;

named! {
    /// What of a class of state a data-parallel rank holds.
    #[derive(Default)]
    pub enum Share {
        /// Every rank holds all of it.
        #[default]
        Whole = "whole",
        /// Its shard.
        Shard = "shard",
        /// Nothing: there is none.
        Absent = "none",
    }
}

named! {
    /// Where a class of state lives between its uses.
    #[derive(Default)]
    pub enum Tier {
        /// On the device.
        #[default]
        Device = "device",
        /// In the host's memory.
        Host = "host",
        /// On a disk.
        Disk = "disk",
    }
}

/// How one class of state lies on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ClassLayout {
    /// What of it the rank holds.
    pub share: Share,
    /// Where that lives.
    pub tier: Tier,
}

/// How the state of every unit lies on the ranks that run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StateLayout {
    /// Parameters. A shard is gathered around each use.
    pub parameters: ClassLayout,
    /// Sums of gradients. Whole ones are reduced once a step, shards after each microbatch.
    pub gradients: ClassLayout,
    /// The optimizer's state, and with it what the rank updates of the parameters. Away from the device, the host updates.
    pub optimizer: ClassLayout,
    /// What forward passes keep for backward; always whole.
    pub activations: ClassLayout,
    /// How many passes ahead of its own a unit's parameters begin to be gathered. 0 gathers on demand and holds the fewest.
    pub gather_ahead: usize,
    /// Whether parameters gathered for forward stay until backward has read them: one gathering less, but all are held at a time.
    pub keep_gathered: bool,
    /// How many uses of a class ahead of its own use state that is away begins to be fetched.
    pub fetch_ahead: usize,
    /// How many units' activations leave: the first of those that [keep](crate::Chain::keeps) some, which wait longest for backward.
    pub num_moved: usize,
}

impl Default for StateLayout {
    /// Everything is whole and stays on the device; of activations that do not, all leave.
    fn default() -> Self {
        StateLayout::WHOLE
    }
}

impl StateLayout {
    /// Everything is whole and stays on the device.
    pub const WHOLE: StateLayout = {
        let here = ClassLayout { share: Share::Whole, tier: Tier::Device };
        StateLayout {
            parameters: here,
            gradients: here,
            optimizer: here,
            activations: here,
            gather_ahead: 1,
            keep_gathered: false,
            fetch_ahead: 1,
            num_moved: usize::MAX,
        }
    };

    /// What a stage of ZeRO shards (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
    /// 2020, section 5): nothing, the optimizer's state, sums of gradients as well, and parameters as well.
    ///
    /// # Panics
    /// If there is no such stage.
    pub const fn zero(stage: usize) -> StateLayout {
        assert!(stage <= 3, "stages of ZeRO are 0 to 3");
        let mut layout = StateLayout::WHOLE;
        if stage >= 1 {
            layout.optimizer.share = Share::Shard;
        }
        if stage >= 2 {
            layout.gradients.share = Share::Shard;
        }
        if stage >= 3 {
            layout.parameters.share = Share::Shard;
        }
        layout
    }

    /// The same where units only run forward: there are neither gradients nor state of an optimizer.
    pub fn forward_only(mut self) -> StateLayout {
        let absent = ClassLayout { share: Share::Absent, tier: Tier::Device };
        (self.gradients, self.optimizer) = (absent, absent);
        self
    }

    /// Whether parameters are trained.
    pub fn is_trained(&self) -> bool {
        self.gradients.share != Share::Absent
    }

    /// How a class lies.
    pub fn of(mut self, class: StateClass) -> ClassLayout {
        *self.of_mut(class)
    }

    /// How a class lies, to change.
    pub fn of_mut(&mut self, class: StateClass) -> &mut ClassLayout {
        match class {
            StateClass::Optimizer => &mut self.optimizer,
            StateClass::Parameters => &mut self.parameters,
            StateClass::Gradients => &mut self.gradients,
            StateClass::Activations => &mut self.activations,
        }
    }

    /// The same, but that `class` lives at `tier`.
    pub fn with_tier(mut self, class: StateClass, tier: Tier) -> Self {
        self.of_mut(class).tier = tier;
        self
    }

    /// Whether ranks hold shards of a class.
    pub fn is_sharded(&self, class: StateClass) -> bool {
        self.of(class).share == Share::Shard
    }

    /// Whether ranks hold shards of any class.
    pub fn has_shards(&self) -> bool {
        StateClass::ALL.iter().any(|&class| self.is_sharded(class))
    }

    /// Whether a class lives elsewhere than on the device.
    pub fn is_away(&self, class: StateClass) -> bool {
        self.of(class).tier != Tier::Device
    }

    /// Whether programs fetch and evict a class: state on a disk, and activations off the device. Other state is used on the host.
    pub fn moves(&self, class: StateClass) -> bool {
        match self.of(class).tier {
            Tier::Device => false,
            Tier::Host => class == StateClass::Activations,
            Tier::Disk => true,
        }
    }

    /// The same with defaults for the fields that it does not use, so that equal programs have equal layouts.
    pub(crate) fn normalized(self) -> Self {
        let StateLayout { parameters, gradients, optimizer, activations, .. } = self;
        let mut layout = StateLayout { parameters, gradients, optimizer, activations, ..StateLayout::WHOLE };
        if self.is_sharded(StateClass::Parameters) {
            (layout.gather_ahead, layout.keep_gathered) = (self.gather_ahead, self.keep_gathered);
        }
        if StateClass::ALL.iter().any(|&class| self.moves(class)) {
            layout.fetch_ahead = self.fetch_ahead;
        }
        if self.is_away(StateClass::Activations) {
            layout.num_moved = self.num_moved;
        }
        layout
    }

    /// The class of the weights that a rank updates: `Parameters` if these are sharded, else `Optimizer`, beside whole parameters.
    pub fn class_of_weights(&self) -> StateClass {
        if self.is_sharded(StateClass::Parameters) { StateClass::Parameters } else { StateClass::Optimizer }
    }

    /// Whether a class may live at `tier`, in steps of `num_microbatches`. Only shards and activations may leave the device. Gradients
    /// may leave only if updates read shards, too, and go to a disk only with one microbatch a step, because several are summed in
    /// memory.
    pub fn can_live(&self, class: StateClass, tier: Tier, num_microbatches: usize) -> bool {
        let is_summed = class == StateClass::Gradients && num_microbatches > 1;
        let is_apart = match class {
            StateClass::Activations => true,
            StateClass::Gradients => self.is_sharded(class) && self.is_sharded(StateClass::Optimizer),
            StateClass::Parameters | StateClass::Optimizer => self.is_sharded(class),
        };
        tier == Tier::Device || is_apart && !(is_summed && tier == Tier::Disk)
    }

    /// Whether programs exist for it in steps of `num_microbatches`. A rank that updates all of the parameters holds all of
    /// them. What is trained has gradients and an optimizer, and nothing else has.
    pub fn is_possible(&self, num_microbatches: usize) -> bool {
        let can_live = |class| self.can_live(class, self.of(class).tier, num_microbatches);
        let [parameters, optimizer, activations] =
            [StateClass::Parameters, StateClass::Optimizer, StateClass::Activations]
                .map(|class| self.is_sharded(class));
        let is_absent = |class| self.of(class).share == Share::Absent;
        let is_trained = self.is_trained();
        let are_there = !is_absent(StateClass::Parameters) && !is_absent(StateClass::Activations);
        StateClass::ALL.into_iter().all(can_live)
            && (optimizer || !parameters || !is_trained)
            && !activations
            && are_there
            && is_trained != is_absent(StateClass::Optimizer)
    }
}

/// As in the first line of a program: what differs from whole state on the device, in pairs of words.
impl fmt::Display for StateLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for class in StateClass::ALL {
            let ClassLayout { share, tier } = self.of(class);
            match tier {
                Tier::Device if share == Share::Whole => (),
                Tier::Device => write!(f, " {} {}", class.name(), share.name())?,
                tier => write!(f, " {} {}@{}", class.name(), share.name(), tier.name())?,
            }
        }
        let whole = StateLayout::WHOLE;
        if self.gather_ahead != whole.gather_ahead {
            write!(f, " gather_ahead {}", self.gather_ahead)?;
        }
        if self.keep_gathered {
            f.write_str(" gathered kept")?;
        }
        if self.fetch_ahead != whole.fetch_ahead {
            write!(f, " fetch_ahead {}", self.fetch_ahead)?;
        }
        if self.num_moved != whole.num_moved {
            write!(f, " moved_units {}", self.num_moved)?;
        }
        Ok(())
    }
}

impl FromStr for StateLayout {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let (pairs, odd) = words.as_chunks::<2>();
        let mut layout = StateLayout::WHOLE;
        let read = pairs.iter().try_for_each(|[key, value]| layout.read(key, value));
        let expected = "pairs such as 'optimizer shard@host'";
        read.filter(|()| odd.is_empty())
            .map(|()| layout)
            .ok_or_else(|| ParseError(format!("'{text}' is no layout of state; expected {expected}")))
    }
}

impl StateLayout {
    /// Takes a pair of words of its text in; `None` if it is no such pair.
    pub(crate) fn read(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "gather_ahead" => self.gather_ahead = value.parse().ok()?,
            "gathered" if value == "kept" => self.keep_gathered = true,
            "fetch_ahead" => self.fetch_ahead = value.parse().ok()?,
            "moved_units" => self.num_moved = value.parse().ok()?,
            _ => {
                let class = StateClass::named(key)?;
                let (share, tier) = value.split_once('@').unwrap_or((value, Tier::Device.name()));
                let layout = ClassLayout { share: Share::named(share)?, tier: Tier::named(tier)? };
                *self.of_mut(class) = layout;
            }
        }
        Some(())
    }
}
