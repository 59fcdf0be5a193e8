use super::*;

fn read(variables: &str) -> Result<Option<WorkerEnvironment>, LaunchError> {
    let lookup = |name: &str| {
        let mut pairs = variables.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
    };
    WorkerEnvironment::from_variables(&lookup)
}

/// Returns the rank, world size, local rank, local world size and address of rank 0.
fn worker(variables: &str) -> (usize, usize, usize, usize, String) {
    let worker = read(variables).unwrap().expect("a worker");
    let meeting_point = format!("{}:{}", worker.master_addr, worker.master_port);
    (worker.rank.0, worker.world_size, worker.local_rank, worker.local_world_size, meeting_point)
}

fn error(variables: &str) -> String {
    read(variables).unwrap_err().to_string()
}

const SRUN: &str = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 \
                    SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_JOB_NODELIST=node[08-09] ENVIRONMENT=BATCH \
                    SLURM_LAUNCH_NODE_IPADDR=10.0.0.1";

#[test]
fn without_variables_there_is_no_worker() {
    assert_eq!(read("").unwrap(), None);
    assert_eq!(read("MASTER_ADDR=host MASTER_PORT=1 RANK= SLURM_JOB_ID=3").unwrap(), None);
}

#[test]
fn torchrun() {
    let remote = "RANK=5 WORLD_SIZE=8 MASTER_ADDR=node1 MASTER_PORT=29400";
    assert_eq!(
        worker(&format!("{remote} LOCAL_RANK=1 LOCAL_WORLD_SIZE=4")),
        (5, 8, 1, 4, "node1:29400".to_owned())
    );
    assert_eq!(worker(remote), (5, 8, 0, 1, "node1:29400".to_owned()));
    let here = "RANK=1 WORLD_SIZE=2 MASTER_PORT=29400 MASTER_ADDR";
    for address in ["127.0.0.1", "localhost", "::1"] {
        assert_eq!(worker(&format!("{here}={address}")), (1, 2, 1, 2, format!("{address}:29400")));
    }
    // torchrun's store keeps the port.
    let store = "TORCHELASTIC_USE_AGENT_STORE=True";
    assert_eq!(worker(&format!("{remote} {store}")).4, "node1:29401");
    assert_eq!(worker(&format!("{store} RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=65535")).4, "a:65534");
    assert_eq!(worker(&format!("{remote} TORCHELASTIC_USE_AGENT_STORE=False")).4, "node1:29400");
    // Under srun, torchrun's variables take precedence over SLURM's variables.
    assert_eq!(worker(&format!("{remote} {SRUN}")).0, 5);
    assert_eq!(worker(&format!("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1 {SRUN}")).1, 1);
}

#[test]
fn partial_sets_are_refused_by_name() {
    for (variables, present, missing) in [
        ("RANK=0", "RANK", "WORLD_SIZE"),
        ("RANK=0 WORLD_SIZE=1", "RANK", "MASTER_ADDR"),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", "RANK", "MASTER_PORT"),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1 LOCAL_RANK=0", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("WORLD_SIZE=2", "WORLD_SIZE", "RANK"),
        ("LOCAL_RANK=0", "LOCAL_RANK", "RANK"),
        ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK=1", "PMI_RANK", "PMI_SIZE"),
        ("PMI_RANK=1 PMI_SIZE=2", "PMI_RANK", "MASTER_ADDR"),
        ("SLURM_PROCID=1", "SLURM_PROCID", "SLURM_NTASKS"),
        ("SLURM_PROCID=1 SLURM_NTASKS=2", "SLURM_PROCID", "SLURM_LOCALID"),
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0", "SLURM_PROCID", "SLURM_NTASKS_PER_NODE"),
    ] {
        let text = error(variables);
        assert!(text.starts_with(&format!("{present} is set but {missing} is not")), "{variables}: {text}");
    }
}

#[test]
fn contradictions_and_bad_numbers_are_refused_by_name() {
    let set = |rest: &str| format!("MASTER_ADDR=a MASTER_PORT=1 {rest}");
    for (rest, parts) in [
        ("RANK=2 WORLD_SIZE=2", ["RANK = 2", "WORLD_SIZE = 2"]),
        ("RANK=3 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", ["LOCAL_RANK = 2", "LOCAL_WORLD_SIZE = 2"]),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", ["LOCAL_WORLD_SIZE = 4", "WORLD_SIZE = 2"]),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", ["LOCAL_RANK = 1", "RANK = 0"]),
        ("PMI_RANK=0 PMI_SIZE=2 WORLD_SIZE=4", ["WORLD_SIZE = 4", "PMI_SIZE = 2"]),
        ("RANK=-1 WORLD_SIZE=2", ["RANK is '-1'", "expected a whole number"]),
        ("RANK=0 WORLD_SIZE=99999999999", ["WORLD_SIZE is '99999999999'", "1048576"]),
        ("RANK=0 WORLD_SIZE=two", ["WORLD_SIZE is 'two'", "expected a whole number"]),
    ] {
        let text = error(&set(rest));
        assert!(parts.iter().all(|part| text.contains(part)), "{rest}: {text}");
    }
    for port in ["0", "65536", "http"] {
        let text = error(&format!("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT={port}"));
        assert!(text.contains(&format!("MASTER_PORT is '{port}'")), "{text}");
    }
    assert!(error(&format!("{SRUN} PMI_RANK=0 PMI_SIZE=2")).contains("PMI_RANK = 0 and SLURM_PROCID = 5"));
    assert!(error(&format!("{SRUN} WORLD_SIZE=2")).contains("WORLD_SIZE = 2 and SLURM_NTASKS = 7"));
}

#[test]
fn slurm() {
    let (rank, world_size, local_rank, local_world_size, meeting_point) = worker(SRUN);
    assert_eq!((rank, world_size, local_rank, local_world_size), (5, 7, 1, 3));
    let (host, port) = meeting_point.split_once(':').unwrap();
    assert_eq!(host, "node08");
    assert!((20_000..30_000).contains(&port.parse().unwrap()), "{port}");
    // Two steps of one job use different ports, and variables that the user has set take precedence.
    assert_ne!(worker(&SRUN.replace("STEP_ID=0", "STEP_ID=1")).4, meeting_point);
    assert_eq!(worker(&format!("MASTER_ADDR=head MASTER_PORT=3 {SRUN}")).4, "head:3");
    assert_eq!(
        worker(&SRUN.replace("SLURM_JOB_NODELIST=node[08-09]", "")).4.split(':').next(),
        Some("10.0.0.1")
    );

    let one_host = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NTASKS_PER_NODE=2";
    assert_eq!(worker(one_host), (1, 2, 1, 2, "127.0.0.1:29500".to_owned()));
    assert!(error(&SRUN.replace("=4,3", "=4")).contains("SLURM_STEP_TASKS_PER_NODE is '4'"));
}

#[test]
fn slurm_variables_outside_of_tasks_make_no_worker() {
    let batch_script = SRUN.replace("SLURM_STEP_ID=0", "").replace("SLURM_PROCID=5", "SLURM_PROCID=0");
    assert_eq!(read(&batch_script).unwrap(), None);
    let shell_of_salloc =
        "SLURM_JOB_ID=77 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4 SLURM_JOB_NODELIST=node[1-2]";
    assert_eq!(read(shell_of_salloc).unwrap(), None);
    let interactive_step = "SLURM_JOB_ID=77 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_LOCALID=0 \
                            SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8 PMI_RANK=0 PMI_SIZE=1";
    assert_eq!(read(interactive_step).unwrap(), None);
}

#[test]
fn open_mpi_and_pmi() {
    let open_mpi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1";
    assert_eq!(
        worker(&format!("{open_mpi} OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=node1 {SRUN}")),
        (3, 4, 1, 2, "node1:29500".to_owned())
    );
    assert_eq!(worker(&format!("{open_mpi} OMPI_COMM_WORLD_LOCAL_SIZE=4")).4, "127.0.0.1:29500");
    let text = error(&format!("{open_mpi} OMPI_COMM_WORLD_LOCAL_SIZE=2"));
    assert!(text.contains("MASTER_ADDR is not"), "{text}");
    assert_eq!(
        worker("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2"),
        (1, 2, 1, 2, "127.0.0.1:29500".to_owned())
    );
    assert_eq!(worker("PMI_RANK=1 PMI_SIZE=2 MASTER_ADDR=node1").2, 0);
}
