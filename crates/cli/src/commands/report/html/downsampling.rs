//! Thinning of curves: long runs are drawn with few points.

/// A point of a curve, which represents one step or several neighboring steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CurvePoint {
    /// The middle step.
    pub(super) step: u64,
    pub(super) low: f64,
    pub(super) mean: f64,
    pub(super) high: f64,
}

/// A curve in parts. Between the parts, values are missing or not finite.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct DownsampledCurve {
    pub(super) parts: Vec<Vec<CurvePoint>>,
    /// Maximum number of steps that a point represents.
    pub(super) steps_per_point: usize,
}

/// Maximum number of points of a curve.
const POINTS_MAX: usize = 300;

/// Maximum absolute value that is drawn. A larger value would leave no finite scale; the values of real runs are far below.
const VALUE_MAX: f64 = 1e100;

/// Combines neighboring values until there are at most [`POINTS_MAX`] points. Points keep their lowest and highest values, so a spike of
/// one step stays visible.
pub(super) fn downsampled(values: &[(u64, Option<f64>)]) -> DownsampledCurve {
    let steps_per_point = values.len().div_ceil(POINTS_MAX).max(1);
    let mut parts = vec![Vec::new()];
    for neighbors in values.chunks(steps_per_point) {
        match curve_point(neighbors) {
            Some(point) => parts.last_mut().expect("there is always one").push(point),
            None => parts.push(Vec::new()),
        }
    }
    parts.retain(|part| !part.is_empty());
    DownsampledCurve { parts, steps_per_point }
}

/// Combines the values of neighboring steps into one point; `None` if no step has a value.
fn curve_point(neighbors: &[(u64, Option<f64>)]) -> Option<CurvePoint> {
    let (mut low, mut high, mut sum, mut number) = (f64::INFINITY, f64::NEG_INFINITY, 0.0, 0);
    for value in neighbors.iter().filter_map(|(_, value)| *value).filter(|value| value.abs() <= VALUE_MAX) {
        (low, high) = (low.min(value), high.max(value));
        sum += value;
        number += 1;
    }
    let (step, _) = neighbors[neighbors.len() / 2];
    (number > 0).then(|| CurvePoint { step, low, mean: sum / f64::from(number), high })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_curve_keeps_its_ends_and_its_spike() {
        let value = |step: u64| if step == 54_321 { 99.0 } else { 1.0 + step as f64 / 1e5 };
        let values: Vec<(u64, Option<f64>)> = (1..=100_000).map(|step| (step, Some(value(step)))).collect();
        let DownsampledCurve { parts, steps_per_point } = downsampled(&values);
        let [points] = &parts[..] else { panic!("{} parts", parts.len()) };
        assert_eq!((points.len(), steps_per_point), (300, 334));
        let spikes: Vec<&CurvePoint> = points.iter().filter(|point| point.high == 99.0).collect();
        assert!(spikes.len() == 1 && spikes[0].step.abs_diff(54_321) <= 167 && spikes[0].low < 1.6);
        assert_eq!((points[0].low, points[299].high), (1.00001, 2.0));
        assert!(points.windows(2).all(|pair| pair[0].step < pair[1].step));
    }

    #[test]
    fn a_short_curve_is_kept_and_missing_values_are_gaps() {
        let values = [
            (1, Some(1.0)),
            (2, None),
            (3, Some(3.0)),
            (4, Some(4.0)),
            (5, Some(1e200)),
            (6, Some(f64::NAN)),
        ];
        let point = |step, value| CurvePoint { step, low: value, mean: value, high: value };
        let expected = vec![vec![point(1, 1.0)], vec![point(3, 3.0), point(4, 4.0)]];
        assert_eq!(downsampled(&values), DownsampledCurve { parts: expected, steps_per_point: 1 });
        assert_eq!(downsampled(&[(1, None)]).parts, Vec::<Vec<CurvePoint>>::new());
        assert_eq!(downsampled(&[]).parts, Vec::<Vec<CurvePoint>>::new());
    }
}
