//! Serves the most recent record of a run over HTTP in the Prometheus text format.
//!
//! One thread serves up to [`CONNECTIONS_MAX`] connections at a time, each for at most [`CONNECTION_DURATION_MAX`]. A further client
//! replaces the oldest connection, so clients that connect and send nothing do not block others.

use super::{MetricsError, StepRecord};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use trireme_base::spawn_thread;

/// Prometheus' text format (<https://prometheus.io/docs/instrumenting/exposition_formats>).
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const CONNECTIONS_MAX: usize = 16;

const CONNECTION_DURATION_MAX: Duration = Duration::from_secs(2);

const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Pause before connections are accepted again after the system has refused one.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Names of counters, which only increase. By Prometheus' convention, `_total` is appended to their names.
const COUNTERS: [&str; 4] = ["steps", "samples", "tokens", "skipped_steps"];

/// An HTTP endpoint that answers requests for `/metrics` until it is dropped.
pub(crate) struct PrometheusEndpoint {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    text: Mutex<String>,
    is_over: AtomicBool,
}

impl Shared {
    fn text(&self) -> MutexGuard<'_, String> {
        self.text.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PrometheusEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrometheusEndpoint({})", self.address)
    }
}

impl PrometheusEndpoint {
    /// Listens at this address. Fails if the address is in use or does not belong to this machine.
    pub(crate) fn open(address: SocketAddr) -> Result<Self, MetricsError> {
        let refuse = |source| MetricsError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        listener.set_nonblocking(true).map_err(refuse)?;
        let thread = spawn_thread("prometheus", move || serve(&listener, &of_thread)).map_err(refuse)?;
        Ok(PrometheusEndpoint { address, shared, thread: Some(thread) })
    }

    /// Replaces the record that is served.
    pub(super) fn show(&self, record: &StepRecord) {
        let mut text = self.shared.text();
        text.clear();
        write_record(&mut text, record).expect("a string takes everything");
    }
}

impl Drop for PrometheusEndpoint {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        let here = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        // Connecting wakes the thread, which may be waiting for a connection. If connecting fails, the thread is not joined; it ends with
        // the process.
        let woken = TcpStream::connect_timeout(&(here, self.address.port()).into(), CONNECTION_DURATION_MAX);
        if woken.is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Serves connections until the endpoint is dropped, or until waiting for them fails.
fn serve(listener: &TcpListener, shared: &Shared) {
    let mut connections: VecDeque<Connection> = VecDeque::new();
    while wait(listener, &connections).is_ok() && !shared.is_over.load(Ordering::Relaxed) {
        let now = Instant::now();
        // An error closes a connection. The client can repeat its request.
        connections.retain_mut(|connection| {
            connection.deadline > now && connection.advance(shared).unwrap_or(false)
        });
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    if connections.len() == CONNECTIONS_MAX {
                        connections.pop_front();
                    }
                    connections.extend(Connection::new(stream, now + CONNECTION_DURATION_MAX));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // There may be too many open files, for example. The client waits, and the pause keeps this thread from spinning.
                Err(_) => {
                    thread::sleep(ACCEPT_RETRY);
                    break;
                }
            }
        }
    }
}

/// Waits until a client connects, a connection is ready, or the deadline of a connection has passed.
fn wait(listener: &TcpListener, connections: &VecDeque<Connection>) -> io::Result<()> {
    let mut ready = vec![PollFd::new(listener, PollFlags::IN)];
    ready.extend(connections.iter().map(|Connection { stream, answer, .. }| {
        PollFd::new(stream, if answer.is_empty() { PollFlags::IN } else { PollFlags::OUT })
    }));
    // The oldest connection has the earliest deadline.
    let left = connections.front().map(|oldest| oldest.deadline.saturating_duration_since(Instant::now()));
    let left =
        left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    match poll(&mut ready, left.as_ref()) {
        Err(Errno::INTR) => Ok(()),
        waited => Ok(waited.map(drop)?),
    }
}

struct Connection {
    /// Non-blocking.
    stream: TcpStream,
    /// The time at which an open connection is closed.
    deadline: Instant,
    request: Vec<u8>,
    /// The part of the answer that is not sent yet. Empty until the request is complete.
    answer: Vec<u8>,
}

impl Connection {
    fn new(stream: TcpStream, deadline: Instant) -> Option<Self> {
        stream.set_nonblocking(true).ok()?;
        Some(Connection { stream, deadline, request: Vec::new(), answer: Vec::new() })
    }

    /// Reads and writes as much as is possible without blocking. Returns whether the connection remains open.
    fn advance(&mut self, shared: &Shared) -> io::Result<bool> {
        match self.read_and_write(shared) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(true),
            ended => ended.map(|()| false),
        }
    }

    /// Returns `Ok` when the answer is written, or when the client sends no more or too much.
    fn read_and_write(&mut self, shared: &Shared) -> io::Result<()> {
        let mut chunk = [0; 1024];
        while self.answer.is_empty() {
            let length = self.stream.read(&mut chunk)?;
            self.request.extend_from_slice(&chunk[..length]);
            if self.request.windows(4).any(|end| end == b"\r\n\r\n") {
                self.answer = answer(&self.request, &shared.text());
            } else if length == 0 || self.request.len() > REQUEST_BYTES_MAX {
                return Ok(());
            }
        }
        while !self.answer.is_empty() {
            let length = self.stream.write(&self.answer)?;
            self.answer.drain(..length);
        }
        Ok(())
    }
}

/// Returns the answer to a request whose head is complete.
fn answer(request: &[u8], text: &str) -> Vec<u8> {
    let mut words = request.split(|byte| byte.is_ascii_whitespace());
    let (method, target) = (words.next(), words.next().unwrap_or_default());
    let is_head = method == Some(b"HEAD");
    let path = target.split(|&byte| byte == b'?').next();
    let (status, body) = if path == Some(b"/metrics") && (is_head || method == Some(b"GET")) {
        ("200 OK", text)
    } else {
        ("404 Not Found", "see /metrics\n")
    };
    let length = body.len();
    let body = if is_head { "" } else { body };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    answer.into_bytes()
}

fn write_record(text: &mut String, record: &StepRecord) -> fmt::Result {
    let mut last = String::new();
    let mut result = write_number(text, &mut last, "steps", None, record.step as f64);
    record.scalars(|group, name, value| {
        let (name, label) = match group {
            "metrics" => ("metric", Some(("name", name))),
            "validation_metrics" => ("validation_metric", Some(("name", name))),
            "memory_peak_bytes" => (group, Some(("category", name))),
            "validation" if name == "loss" => ("validation_loss", None),
            "validation" => ("initial_validation_loss", None),
            _ => (name, None),
        };
        if result.is_ok() {
            result = write_number(text, &mut last, name, label, value);
        }
    });
    result
}

/// Writes a number with its label, after a `# TYPE` line if `name` differs from `last`, the name of the number before.
fn write_number(
    text: &mut String,
    last: &mut String,
    name: &str,
    label: Option<(&str, &str)>,
    value: f64,
) -> fmt::Result {
    let (kind, end) = if COUNTERS.contains(&name) { ("counter", "_total") } else { ("gauge", "") };
    if last != name {
        writeln!(text, "# TYPE trireme_{name}{end} {kind}")?;
        name.clone_into(last);
    }
    write!(text, "trireme_{name}{end}")?;
    if let Some((label, of)) = label {
        write!(text, "{{{label}=\"{of}\"}}")?;
    }
    match value {
        f64::INFINITY => writeln!(text, " +Inf"),
        f64::NEG_INFINITY => writeln!(text, " -Inf"),
        value => writeln!(text, " {value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_record_is_shown() {
        let endpoint = PrometheusEndpoint::open(([127, 0, 0, 1], 0).into()).unwrap();
        let address = endpoint.address;
        let ask = |method: &str, path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            write!(stream, "{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let get = |path: &str| ask("GET", path);
        assert!(get("/metrics").starts_with("HTTP/1.1 200"));
        let mut record = StepRecord { step: 3, loss: 2.5, grad_norm: f64::NAN, ..StepRecord::default() };
        record.lr = f64::INFINITY;
        record.metrics.push(("accuracy", 0.5));
        record.metrics.push(("recall", 0.25));
        record.validation_metrics.push(("accuracy", 0.75));
        endpoint.show(&record);
        let shown = get("/metrics");
        for line in [
            "# TYPE trireme_steps_total counter\ntrireme_steps_total 3\n",
            "\ntrireme_loss 2.5\n",
            "\ntrireme_grad_norm NaN\n",
            "\ntrireme_lr +Inf\n",
            "\ntrireme_memory_peak_bytes{category=\"total\"} 0\n",
            "\ntrireme_metric{name=\"accuracy\"} 0.5\ntrireme_metric{name=\"recall\"} 0.25\n",
            "\ntrireme_validation_metric{name=\"accuracy\"} 0.75\n",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        for name in ["memory_peak_bytes", "metric"] {
            assert_eq!(shown.matches(&format!("# TYPE trireme_{name} ")).count(), 1);
        }
        assert_eq!(get("/metrics?target=a"), shown);
        assert!(get("/").starts_with("HTTP/1.1 404") && get("/metricsx").starts_with("HTTP/1.1 404"));
        let head = ask("HEAD", "/metrics");
        assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
        let length = shown.split_once("\r\n\r\n").unwrap().1.len();
        assert!(head.contains(&format!("\r\nContent-Length: {length}\r\n")), "{head}");
        assert!(PrometheusEndpoint::open(address).is_err(), "the port is in use");
        // Clients that send nothing or half a request do not block others. Served one after the other, they would take longer than the read
        // timeout.
        let idle: Vec<TcpStream> =
            (0..4 * CONNECTIONS_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        let mut half = TcpStream::connect(address).unwrap();
        write!(half, "GET /met").unwrap();
        assert_eq!(get("/metrics"), shown);
        drop((idle, half));
        // A client that sends less than it announces does not block others.
        let mut slow = TcpStream::connect(address).unwrap();
        write!(slow, "POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\nabc").unwrap();
        assert!(get("/metrics").contains("trireme_loss 2.5"));
        drop(endpoint);
        assert!(PrometheusEndpoint::open(address).is_ok());
    }
}
