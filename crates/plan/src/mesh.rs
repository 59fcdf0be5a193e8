use std::fmt;
use trireme_base::Rank;

/// A named axis of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axis(&'static str);

impl Axis {
    /// Pipeline parallelism: the ranks hold different units of the model and process the same microbatches.
    pub const PIPELINE: Axis = Axis::named("pipeline");
    /// Data parallelism with replicas: the ranks hold the same parameters and process different microbatches.
    pub const DATA_REPLICATE: Axis = Axis::named("data_replicate");
    /// Data parallelism with sharding: the ranks shard all or a part of the training state, and process different microbatches.
    pub const DATA_SHARD: Axis = Axis::named("data_shard");
    /// Context parallelism: the ranks hold the same parameters, or shards of them, and process parts of the same sequences.
    pub const CONTEXT: Axis = Axis::named("context");
    /// Expert parallelism: data-parallel ranks that hold different experts.
    pub const EXPERT: Axis = Axis::named("expert");
    /// Tensor parallelism: the ranks hold parts of the same parameters and process the same microbatches.
    pub const TENSOR: Axis = Axis::named("tensor");

    /// Returns the axis with this name.
    pub const fn named(name: &'static str) -> Self {
        Axis(name)
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// The ranks of a job, arranged in a grid of named axes. Ranks are numbered in row-major order: the first axis varies slowest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mesh {
    axes: Vec<(Axis, usize)>,
}

/// The error returned when axes do not form a mesh.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum MeshError {
    #[error("the degree of axis {axis} is 0; it must be at least 1")]
    ZeroDegree { axis: Axis },
    #[error("axis {axis} occurs twice")]
    RepeatedAxis { axis: Axis },
}

impl Mesh {
    /// Creates a mesh of the given axes with their degrees. The first axis varies slowest.
    ///
    /// # Errors
    /// If a degree is 0 or an axis occurs twice.
    pub fn new(axes: &[(Axis, usize)]) -> Result<Self, MeshError> {
        for (index, &(axis, degree)) in axes.iter().enumerate() {
            if degree == 0 {
                return Err(MeshError::ZeroDegree { axis });
            }
            if axes[..index].iter().any(|(earlier, _)| *earlier == axis) {
                return Err(MeshError::RepeatedAxis { axis });
            }
        }
        Ok(Mesh { axes: axes.to_vec() })
    }

    /// Creates the mesh of pure data parallelism, with `degree` replicas.
    ///
    /// # Panics
    /// If `degree` is 0.
    pub fn data_parallel(degree: usize) -> Self {
        Mesh::new(&[(Axis::DATA_REPLICATE, degree)]).expect("one axis of at least one rank is a mesh")
    }

    /// Returns the axes with their degrees. The first axis varies slowest.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// Returns the number of ranks: the product of the degrees.
    pub fn num_ranks(&self) -> usize {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// Returns the position of `rank` along each axis, in the order of [`axes`](Mesh::axes).
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn coordinates(&self, rank: Rank) -> Vec<usize> {
        assert!(rank.0 < self.num_ranks(), "rank {rank} is outside of a mesh of {}", self.num_ranks());
        let mut rest = rank.0;
        let mut coordinates = vec![0; self.axes.len()];
        for (slot, (_, degree)) in coordinates.iter_mut().zip(&self.axes).rev() {
            *slot = rest % degree;
            rest /= degree;
        }
        coordinates
    }

    /// Returns the number of the group that contains `rank` if ranks are grouped along `axes`. The ranks of a group have equal positions
    /// along all other axes.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn group_of(&self, rank: Rank, axes: &[Axis]) -> usize {
        let places = self.axes.iter().zip(self.coordinates(rank));
        let others = places.filter(|((axis, _), _)| !axes.contains(axis));
        others.fold(0, |group, ((_, degree), place)| group * degree + place)
    }
}

/// Maximum number of rows that are printed. The other rows are omitted.
const ROWS_MAX: usize = 32;

/// Formats the mesh as a table of ranks: a column for each position on the last axis, and a row for each combination of positions on the
/// other axes. Axes with one rank are omitted.
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let several: Vec<(Axis, usize)> =
            self.axes.iter().copied().filter(|(_, degree)| *degree > 1).collect();
        let Some((&(last, num_cols), others)) = several.split_last() else { return writeln!(f, "rank 0") };
        let num_rows = self.num_ranks() / num_cols;
        let width = |axis: Axis, degree: usize| axis.0.len().max((degree - 1).to_string().len());
        let cell = (self.num_ranks() - 1).to_string().len().max((num_cols - 1).to_string().len());
        let row = |f: &mut fmt::Formatter<'_>, name: &str, cells: &mut dyn Iterator<Item = usize>| {
            write!(f, "{name}")?;
            for number in cells {
                write!(f, "  {number:>cell$}")?;
            }
            writeln!(f)
        };
        others.iter().try_for_each(|&(axis, _)| write!(f, "{axis}  "))?;
        row(f, last.0, &mut (0..num_cols))?;
        for index in 0..num_rows.min(ROWS_MAX) {
            let mut rest = index * num_cols;
            for (place, &(axis, degree)) in others.iter().enumerate() {
                let inner: usize = several[place + 1..].iter().map(|(_, degree)| degree).product();
                write!(f, "{:>width$}  ", rest / inner, width = width(axis, degree))?;
                rest %= inner;
            }
            row(f, &" ".repeat(last.0.len()), &mut (index * num_cols..(index + 1) * num_cols))?;
        }
        if num_rows > ROWS_MAX { writeln!(f, "and {} more rows", num_rows - ROWS_MAX) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_count_the_last_axis_fastest() {
        let mesh = Mesh { axes: vec![(Axis::DATA_REPLICATE, 2), (Axis::DATA_SHARD, 3)] };
        assert_eq!(mesh.num_ranks(), 6);
        assert_eq!(mesh.coordinates(Rank(0)), [0, 0]);
        assert_eq!(mesh.coordinates(Rank(2)), [0, 2]);
        assert_eq!(mesh.coordinates(Rank(5)), [1, 2]);
    }

    #[test]
    fn groups_differ_along_their_axes_only() {
        let tensor = Axis::TENSOR;
        let mesh = Mesh::new(&[(Axis::PIPELINE, 2), (Axis::DATA_SHARD, 3), (tensor, 2)]).unwrap();
        let groups = |axes: &[Axis]| (0..12).map(|rank| mesh.group_of(Rank(rank), axes)).collect::<Vec<_>>();
        assert_eq!(groups(&[tensor]), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
        assert_eq!(groups(&[Axis::DATA_SHARD]), [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]);
        assert_eq!(groups(&[Axis::PIPELINE, tensor]), [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn the_table_has_a_row_for_each_position_on_the_other_axes() {
        let axes = [(Axis::PIPELINE, 2), (Axis::DATA_REPLICATE, 1), (Axis::DATA_SHARD, 3), (Axis::TENSOR, 2)];
        let table = Mesh::new(&axes).unwrap().to_string();
        let expected = "\
pipeline  data_shard  tensor   0   1
       0           0           0   1
       0           1           2   3
       0           2           4   5
       1           0           6   7
       1           1           8   9
       1           2          10  11
";
        assert_eq!(table, expected);
        assert_eq!(Mesh::data_parallel(3).to_string(), "data_replicate  0  1  2\n                0  1  2\n");
        assert_eq!(Mesh::data_parallel(1).to_string(), "rank 0\n");
        let large = Mesh::new(&[(Axis::DATA_SHARD, 50), (Axis::TENSOR, 2)]).unwrap().to_string();
        assert!(large.ends_with("and 18 more rows\n"), "{large}");
    }

    #[test]
    fn refuses_degenerate_meshes() {
        let axis = Axis::DATA_REPLICATE;
        assert_eq!(Mesh::new(&[(axis, 0)]), Err(MeshError::ZeroDegree { axis }));
        assert_eq!(Mesh::new(&[(axis, 1), (axis, 1)]), Err(MeshError::RepeatedAxis { axis }));
    }
}
