//! Claims of surveys and papers, computed by Trireme: the rows of `docs/surveys.md`.
//!
//! Everything but the training runs is a test: `cargo test --test surveys`. `cargo xtask surveys` also trains, and writes the document.

mod arithmetic;
mod command_folder;
mod communication;
mod memory;
mod pipelines;
mod table;
mod training;

use command_folder::{CommandFolder, repository};
use std::fs;
use table::Section;

const DOCUMENT: &str = "docs/surveys.md";

/// The amount of computation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Some seconds of dry runs.
    Test,
    /// All dry runs, including the long ones.
    All,
}

/// Returns the sections that are computed without training.
fn dry_sections(product: &CommandFolder, effort: Effort) -> Vec<Section> {
    vec![
        memory::section(product, effort),
        arithmetic::section(product),
        communication::section(product),
        pipelines::section(product),
    ]
}

const SOURCES: &str = "\
## Sources

- Aji, Heafield, \"Sparse communication for distributed gradient descent\", 2017
- Brown et al., \"Language models are few-shot learners\" (GPT-3), 2020
- Chen et al., \"Training deep nets with sublinear memory cost\", 2016
- Dao et al., \"FlashAttention\", 2022
- Huang et al., \"GPipe\", 2019
- Jia et al., \"Highly scalable deep learning training system with mixed-precision\", 2018
- Kaplan et al., \"Scaling laws for neural language models\", 2020
- Korthikanti et al., \"Reducing activation recomputation in large transformer models\", 2022
- Lin et al., \"Deep gradient compression\", 2018
- Lu et al., \"Maximizing communication efficiency for large-scale training via 0/1 Adam\", 2022
- Micikevicius et al., \"Mixed precision training\", 2018
- Narayanan et al., \"PipeDream\", 2019; \"Memory-efficient pipeline-parallel DNN training\" (PipeDream-2BW), 2020; \"Efficient large-scale language model training on GPU clusters using Megatron-LM\", 2021
- Patarasuk, Yuan, \"Bandwidth optimal all-reduce algorithms for clusters of workstations\", 2009
- Peng et al., \"FP8-LM\", 2023
- Qi et al., \"Zero bubble pipeline parallelism\", 2023
- Rajbhandari et al., \"ZeRO\", 2020; \"ZeRO-Infinity\", 2021
- Ren et al., \"ZeRO-Offload\", 2021
- Sergeev, Del Balso, \"Horovod\", 2018
- Shoeybi et al., \"Megatron-LM\", 2019
- Tang et al., \"1-bit Adam\", 2021
- Wang et al., \"ZeRO++\", 2023
- You et al., \"Large batch training of convolutional networks\" (LARS), 2017; \"Large batch optimization for deep learning\" (LAMB), 2020
- Zhao et al., \"PyTorch FSDP\", 2023
";

fn document(product: &CommandFolder, sections: &[Section]) -> String {
    let header = format!(
        "# The surveys' claims\n\nClaims of papers and surveys on distributed training, and the same quantities as Trireme computes them. `cargo xtask surveys` prints this \
         document: no figure in the column *here* is typed in.\n\n\
         - *Memory*, *Arithmetic* and part of *Communication* come from dry runs (`trireme plan --json`), which execute a step on devices that only count; the rest of \
         *Communication* and *Pipelines* from the collective algorithms, codecs and schedules themselves. `cargo test --test surveys` computes them and holds them to bounds.\n\
         - *Training* comes from short runs on this repository's text, on {}.\n\
         - Letters are those of the papers: N workers, P pipeline ranks, M microbatches; b samples of s tokens, width h, a heads. GB are 10^9 bytes.\n",
        product.processor()
    );
    let sections = sections.iter().map(Section::markdown);
    std::iter::once(header).chain(sections).chain([SOURCES.to_owned()]).collect::<Vec<_>>().join("\n")
}

fn claims(sections: &[Section]) -> Vec<String> {
    sections.iter().flat_map(|section| &section.rows).map(|row| row.claim_cell()).collect()
}

#[test]
fn dry_claims_stay_within_their_bounds() {
    let found = claims(&dry_sections(&CommandFolder::new(), Effort::Test));
    let written = fs::read_to_string(repository().join(DOCUMENT)).unwrap_or_default();
    let written: Vec<&str> =
        written.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).collect();
    for claim in &found {
        assert!(written.contains(&claim.as_str()), "{DOCUMENT} lacks '{claim}'; run cargo xtask surveys");
    }
}

#[test]
#[ignore = "trains for minutes and writes docs/surveys.md: cargo xtask surveys"]
fn the_document_is_written() {
    let product = CommandFolder::new();
    let mut sections = dry_sections(&product, Effort::All);
    sections.push(training::section(&product));
    fs::write(repository().join(DOCUMENT), document(&product, &sections)).unwrap();
}
