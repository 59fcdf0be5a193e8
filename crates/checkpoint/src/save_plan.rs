//! Assignment of the parts of tensors to the ranks that write them. A pure function, so all ranks compute the same plan without
//! communication.

use crate::error::CheckpointError;
use crate::extent::split;
use crate::safetensors_file::METADATA_KEY;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use trireme_base::Rank;
use trireme_plan::{Extent, Mesh, TensorPlacement};

/// Default maximum size of a part in bytes. It is small enough that replicas share the work evenly, and that reading a piece of a tensor
/// reads little more than the piece.
pub const PART_BYTES_MAX: u64 = 64 << 20;

/// A box of a tensor that one rank writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WritePart {
    /// Index of the tensor in the list given to [`plan_save`].
    pub tensor: usize,
    /// The elements, consecutive in row-major order within an extent that the rank holds. Never empty.
    pub extent: Extent,
}

/// Returns the parts that each rank of `mesh` writes. Every element of every tensor is written exactly once.
///
/// The extents that a rank holds are split into parts of at most `part_bytes_max` bytes (or one element). A part that one rank alone holds
/// is written by that rank. A part that several ranks hold is assigned to the holder with the fewest bytes so far, the largest parts first,
/// so the ranks' shares differ by little more than a part (the longest-processing-time rule: Graham, "Bounds on multiprocessing timing
/// anomalies", 1969). A rank's parts are sorted by decreasing element size, so that they are aligned in a file without gaps.
///
/// # Errors
/// If names repeat or cannot be stored, or placements do not fit.
pub fn plan_save(
    tensors: &[TensorPlacement],
    mesh: &Mesh,
    part_bytes_max: u64,
) -> Result<Vec<Vec<WritePart>>, CheckpointError> {
    check_names(tensors)?;
    let mut candidates = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let element_bytes = tensor.dtype.size() as u64;
        let elements_max = (part_bytes_max / element_bytes).max(1) as usize;
        for (extent, holders) in extents_with_holders(tensor, mesh)? {
            let holders = Rc::new(holders);
            candidates.extend(split(&extent, elements_max).into_iter().map(|extent| Candidate {
                bytes: extent.num_elements() as u64 * element_bytes,
                part: WritePart { tensor: index, extent },
                holders: Rc::clone(&holders),
            }));
        }
    }
    let mut per_rank = assign(candidates, mesh.num_ranks());
    for parts in &mut per_rank {
        parts.sort_by(|a, b| {
            let key = |part: &WritePart| (Reverse(tensors[part.tensor].dtype.size()), part.tensor);
            key(a).cmp(&key(b)).then_with(|| a.extent.start.cmp(&b.extent.start))
        });
    }
    Ok(per_rank)
}

struct Candidate {
    bytes: u64,
    part: WritePart,
    holders: Rc<Vec<usize>>,
}

/// Assigns each part to one of its holders. Parts with few holders come first, so that the others balance the loads.
fn assign(mut candidates: Vec<Candidate>, num_ranks: usize) -> Vec<Vec<WritePart>> {
    candidates.sort_by_key(|candidate| (candidate.holders.len(), Reverse(candidate.bytes)));
    let mut per_rank = vec![Vec::new(); num_ranks];
    let mut assigned_bytes = vec![0; num_ranks];
    for candidate in candidates {
        let least_loaded = candidate.holders.iter().min_by_key(|&&rank| (assigned_bytes[rank], rank));
        let &rank = least_loaded.expect("a part has a holder");
        assigned_bytes[rank] += candidate.bytes;
        per_rank[rank].push(candidate.part);
    }
    per_rank
}

/// Returns the distinct extents that ranks hold of a tensor, each with the ranks that hold it.
fn extents_with_holders(
    tensor: &TensorPlacement,
    mesh: &Mesh,
) -> Result<Vec<(Extent, Vec<usize>)>, CheckpointError> {
    let mut holders: BTreeMap<(Vec<usize>, Vec<usize>), Vec<usize>> = BTreeMap::new();
    for rank in 0..mesh.num_ranks() {
        for extent in tensor.extents(mesh, Rank(rank))? {
            holders.entry((extent.start, extent.shape)).or_default().push(rank);
        }
    }
    Ok(holders.into_iter().map(|((start, shape), ranks)| (Extent { start, shape }, ranks)).collect())
}

/// Separator between a tensor's name and the start of a part, in the name of the part.
const PART_SEPARATOR: char = '@';

/// Returns the name of a part in its file: the tensor's name and, unless the part is the full tensor, the start of the part, as in
/// `lm_head.weight@128,0`.
pub(crate) fn part_name(tensor: &str, shape: &[usize], extent: &Extent) -> String {
    if extent.shape == shape {
        return tensor.to_owned();
    }
    let start: Vec<String> = extent.start.iter().map(usize::to_string).collect();
    format!("{tensor}{PART_SEPARATOR}{}", start.join(","))
}

fn check_names(tensors: &[TensorPlacement]) -> Result<(), CheckpointError> {
    let mut seen = BTreeSet::new();
    for TensorPlacement { name, .. } in tensors {
        let refuse = |reason| Err(CheckpointError::TensorName { name: name.clone(), reason });
        if name.is_empty() || name == METADATA_KEY {
            return refuse("the file format reserves it");
        }
        if name.contains(PART_SEPARATOR) {
            return refuse("'@' marks a part of a tensor");
        }
        if !seen.insert(name) {
            return refuse("another tensor has the same name");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use trireme_base::DType;
    use trireme_plan::{Axis, Placement};

    fn tensor(name: &str, shape: &[usize], dtype: DType, placement: Placement) -> TensorPlacement {
        TensorPlacement { name: name.into(), shape: shape.to_vec(), dtype, placements: vec![placement] }
    }

    fn mesh(degree: usize) -> Mesh {
        Mesh::new(&[(Axis::DATA_REPLICATE, degree)]).unwrap()
    }

    fn any_tensor() -> impl Strategy<Value = TensorPlacement> {
        let dtype = prop::sample::select(vec![DType::F32, DType::U8, DType::U64]);
        (prop::collection::vec(0..7_usize, 0..4), dtype, any::<bool>(), any::<prop::sample::Index>())
            .prop_map(|(shape, dtype, sharded, dim)| {
                let placement = if sharded && !shape.is_empty() {
                    Placement::Shard { dim: dim.index(shape.len()) }
                } else {
                    Placement::Replicate
                };
                tensor("", &shape, dtype, placement)
            })
    }

    fn bytes(tensors: &[TensorPlacement], parts: &[WritePart]) -> u64 {
        let part_bytes =
            |part: &WritePart| (part.extent.num_elements() * tensors[part.tensor].dtype.size()) as u64;
        parts.iter().map(part_bytes).sum()
    }

    proptest! {
        #[test]
        fn every_element_is_written_once_by_a_rank_that_holds_it(
            mut tensors in prop::collection::vec(any_tensor(), 0..6), degree in 1..6_usize, part_bytes_max in 1..80_u64,
        ) {
            for (index, tensor) in tensors.iter_mut().enumerate() {
                tensor.name = format!("t{index}");
            }
            let plan = plan_save(&tensors, &mesh(degree), part_bytes_max).unwrap();
            prop_assert_eq!(plan.len(), degree);
            let mut written: Vec<Vec<u32>> =
                tensors.iter().map(|tensor| vec![0; tensor.shape.iter().product()]).collect();
            for (rank, parts) in plan.iter().enumerate() {
                for part in parts {
                    let held = tensors[part.tensor].extents(&mesh(degree), Rank(rank)).unwrap();
                    let is_within = |held| crate::extent::intersection(&part.extent, held).as_ref() == Some(&part.extent);
                    prop_assert!(held.iter().any(is_within));
                    let whole = Extent::full(&tensors[part.tensor].shape);
                    for run in trireme_plan::copy_runs(&part.extent, &whole, &part.extent) {
                        let elements = &mut written[part.tensor][run.source..run.source + run.len];
                        elements.iter_mut().for_each(|times| *times += 1);
                    }
                }
            }
            prop_assert!(written.iter().flatten().all(|&times| times == 1));
        }

        #[test]
        fn replicas_share_the_bytes_evenly(
            shapes in prop::collection::vec(prop::collection::vec(1..9_usize, 1..3), 1..6), degree in 1..6_usize,
        ) {
            let tensors: Vec<_> = (shapes.iter().enumerate())
                .map(|(index, shape)| tensor(&index.to_string(), shape, DType::F32, Placement::Replicate))
                .collect();
            let plan = plan_save(&tensors, &mesh(degree), 16).unwrap();
            let loads: Vec<u64> = plan.iter().map(|parts| bytes(&tensors, parts)).collect();
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 16, "{loads:?}");
        }
    }

    #[test]
    fn replicated_parts_balance_uneven_shards() {
        let tensors = [
            tensor("shard", &[1, 8], DType::F32, Placement::Shard { dim: 0 }),
            tensor("replica", &[8], DType::F32, Placement::Replicate),
        ];
        let plan = plan_save(&tensors, &mesh(2), 32).unwrap();
        assert_eq!(plan[0], [WritePart { tensor: 0, extent: Extent::full(&[1, 8]) }]);
        assert_eq!(plan[1], [WritePart { tensor: 1, extent: Extent::full(&[8]) }]);
    }

    #[test]
    fn large_parts_are_assigned_before_small_ones() {
        let tensors = [("a", 1), ("b", 1), ("c", 2)]
            .map(|(name, size)| tensor(name, &[size], DType::F32, Placement::Replicate));
        let plan = plan_save(&tensors, &mesh(2), 64).unwrap();
        assert_eq!([bytes(&tensors, &plan[0]), bytes(&tensors, &plan[1])], [8, 8]);
    }

    #[test]
    fn invalid_names_and_placements_are_refused() {
        let refused = |tensors: &[TensorPlacement]| plan_save(tensors, &mesh(2), 64).unwrap_err();
        let whole = |name| tensor(name, &[2], DType::F32, Placement::Replicate);
        for tensors in
            [vec![whole("")], vec![whole("a@1")], vec![whole("__metadata__")], vec![whole("a"), whole("a")]]
        {
            assert!(matches!(refused(&tensors), CheckpointError::TensorName { .. }));
        }
        let misplaced = tensor("g", &[2], DType::F32, Placement::Shard { dim: 3 });
        assert!(matches!(refused(&[misplaced]), CheckpointError::Placement(_)));
    }

    #[test]
    fn parts_are_named_after_their_start() {
        let part = Extent { start: vec![3, 0], shape: vec![1, 4] };
        assert_eq!(part_name("w", &[4, 4], &part), "w@3,0");
        assert_eq!(part_name("w", &[4, 4], &Extent::full(&[4, 4])), "w");
        assert_eq!(part_name("scalar", &[], &Extent::full(&[])), "scalar");
    }
}
