//! SLURM's compact forms of lists.

/// Returns the first host of a list such as `rack[1-2]node[07-11,20],login`; `None` if the list is malformed.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        let Some(bracket) = rest[end..].strip_prefix('[') else { break };
        let (numbers, after) = bracket.split_once(']')?;
        // The first number, with its leading zeros: they are part of the name.
        host.push_str(numbers.split([',', '-']).next().filter(|number| !number.is_empty())?);
        rest = after;
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (!host.is_empty() && host.chars().all(is_name)).then_some(host)
}

/// Returns the number of tasks on the node of index `node` in a list such as `4(x2),3`: four on nodes 0 and 1, three on node 2.
pub(super) fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    let mut nodes_before = 0_usize;
    for run in list.split(',') {
        let (tasks, count) = match run.split_once("(x") {
            Some((tasks, count)) => (tasks, count.strip_suffix(')')?.parse().ok()?),
            None => (run, 1),
        };
        nodes_before = nodes_before.checked_add(count)?;
        if node < nodes_before {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_keeps_its_leading_zeros() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7]", "node01"),
            ("node[7]", "node7"),
            ("rack[1-2]-node[007,9]x,login", "rack1-node007x"),
            ("gpu-a.cluster.org", "gpu-a.cluster.org"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for wrong in ["", ",node1", "node[", "node[1-2", "node[]", "node[-2]", "a b", "node[1;2]", "a]"] {
            assert_eq!(first_host(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tasks_are_counted_by_runs_of_nodes() {
        let tasks = |node| tasks_on_node("4(x2),3", node);
        assert_eq!([tasks(0), tasks(1), tasks(2), tasks(3)], [Some(4), Some(4), Some(3), None]);
        assert_eq!(tasks_on_node("1(x18446744073709551615)", 5), Some(1));
        for wrong in ["", "x", "2(x", "2(x3", "2(y3)", "0x2"] {
            assert_eq!(tasks_on_node(wrong, 0), None, "{wrong}");
        }
    }
}
