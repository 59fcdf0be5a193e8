//! Workers that come late, or not at all.

use crate::common::{Outcome, Running, Scene, free_port, tells};

const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// Two workers of another launcher, of which each has its own command.
fn world(scene: &Scene, commands: [&str; 2], secret: Option<&str>) -> [Outcome; 2] {
    let port = free_port();
    let start = |rank: usize| {
        let mut worker = scene.worker(rank, port, commands[rank]);
        worker.envs(secret.map(|secret| ("TRIREME_SECRET", secret)));
        Running::start(worker)
    };
    [0, 1].map(start).map(Running::end)
}

#[test]
fn a_worker_that_fails_before_it_joins_ends_the_others_with_its_reason() {
    let scene = Scene::with_corpus();
    let good = "train tiny.toml";
    // What it cannot read says which job it is of; the secret is another sign of that.
    for (bad, secret, reason) in [
        ("train nowhere.toml", Some(SECRET), "the config nowhere.toml does not exist"),
        ("train tiny.toml --set comm.interface=nowhere", None, "no interface 'nowhere'"),
    ] {
        let [first, second] = world(&scene, [good, bad], secret);
        tells(&second.refused(), &[reason]);
        tells(&first.refused(), &["rank 1 failed before all ranks had joined", reason]);
        let [first, second] = world(&scene, [bad, good], secret);
        tells(&first.refused(), &[reason]);
        tells(&second.refused(), &["rank 0 at 127.0.0.1", reason]);
        // If all of them fail, none waits for the others.
        let [first, second] = world(&scene, [bad, bad], secret);
        tells(&first.refused(), &[reason]);
        tells(&second.refused(), &[reason]);
    }
}
