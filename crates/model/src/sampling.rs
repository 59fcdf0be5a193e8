//! Sampling of the next token.

use trireme_base::Random;

/// How the next token is chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 always chooses the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens that are kept; 0 keeps all.
    pub top_k: usize,
    /// Nucleus sampling (Holtzman et al. 2020): the most likely tokens are kept until their total probability reaches this value; 1 keeps
    /// all.
    pub top_p: f32,
    /// Minimum probability of kept tokens, relative to the most likely token; 0 keeps all (Nguyen et al. 2024, "min-p sampling").
    pub min_p: f32,
}

impl Sampling {
    /// Chooses a token. `logits` has one element for each token of the vocabulary. Cost: sorts all logits.
    ///
    /// # Panics
    /// If there are no logits.
    pub fn choose(&self, logits: &[f32], random: &mut Random) -> u32 {
        let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        // The most likely token comes first. Ties are ordered by id, so that the order is total.
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.temperature <= 0.0 {
            return tokens[0].0;
        }
        if self.top_k > 0 {
            tokens.truncate(self.top_k);
        }
        let max = tokens[0].1;
        let mut total = 0.0;
        for (_, weight) in &mut tokens {
            *weight = ((*weight - max) / self.temperature).exp();
            total += f64::from(*weight);
        }
        let mut kept = 0.0;
        let mut num_kept = 0;
        for (_, weight) in &tokens {
            // The most likely token has weight 1, so it is always kept.
            if *weight < self.min_p {
                break;
            }
            kept += f64::from(*weight);
            num_kept += 1;
            if kept >= f64::from(self.top_p) * total {
                break;
            }
        }
        let mut rest = random.next_f64() * kept;
        for &(token, weight) in &tokens[..num_kept] {
            rest -= f64::from(weight);
            if rest < 0.0 {
                return token;
            }
        }
        tokens[num_kept - 1].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_base::RandomKey;

    fn draws(sampling: Sampling) -> Vec<u32> {
        let mut random = Random::new(RandomKey::new(1, "sampling"), 0);
        let logits = [0.0, 2.0, 1.0, -1.0];
        let mut seen: Vec<u32> = (0..300).map(|_| sampling.choose(&logits, &mut random)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    #[test]
    fn limits_keep_the_likeliest_tokens() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };
        assert_eq!(draws(all), [0, 1, 2, 3]);
        assert_eq!(draws(Sampling { temperature: 0.0, ..all }), [1]);
        assert_eq!(draws(Sampling { top_k: 2, ..all }), [1, 2]);
        // The most likely token has probability 0.64, the two most likely 0.88 together.
        assert_eq!(draws(Sampling { top_p: 0.6, ..all }), [1]);
        assert_eq!(draws(Sampling { top_p: 0.7, ..all }), [1, 2]);
        // Each token is e times less likely than the one before it.
        assert_eq!(draws(Sampling { min_p: 0.4, ..all }), [1]);
        assert_eq!(draws(Sampling { min_p: 0.3, ..all }), [1, 2]);
        assert_eq!(draws(Sampling { min_p: 1.0, top_p: 0.9, ..all }), [1]);
        assert_eq!(draws(Sampling { temperature: 0.01, ..all }), [1]);
    }
}
