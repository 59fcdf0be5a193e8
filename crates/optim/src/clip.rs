/// Returns the factor that scales gradients of norm `norm` to a norm of at most `norm_max` (Pascanu et al. 2013). Like PyTorch, adds 1e-6
/// to the norm.
pub fn clip_coefficient(norm: f64, norm_max: f64) -> f64 {
    (norm_max / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_gradients_are_shortened() {
        assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
        assert_eq!(clip_coefficient(0.0, 1.0), 1.0);
        assert!((clip_coefficient(4.0, 1.0) - 0.25).abs() < 1e-6);
    }
}
