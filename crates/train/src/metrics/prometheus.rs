//! The last record of a run over HTTP, as Prometheus reads it.
//!
//! One connection is served at a time, for at most [`CONNECTION_MAX`]: whatever a client does, it can delay others, but not the run.

use super::{MetricsError, StepRecord};
use std::fmt::{self, Write as _};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Prometheus' text format (<https://prometheus.io/docs/instrumenting/exposition_formats>).
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// How long a connection may last.
const CONNECTION_MAX: Duration = Duration::from_secs(2);

/// Bytes of a request that are read at most.
const REQUEST_BYTES_MAX: usize = 8 << 10;

/// Numbers that only grow; their names end as Prometheus has it.
const COUNTERS: [&str; 4] = ["steps", "samples", "tokens", "skipped_steps"];

/// Answers requests for `/metrics` while it lives.
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
    /// Listens at this address.
    ///
    /// # Errors
    /// If it is in use, or not this machine's.
    pub(crate) fn open(address: SocketAddr) -> Result<Self, MetricsError> {
        let refuse = |source| MetricsError::Listen { address, source };
        let listener = TcpListener::bind(address).map_err(refuse)?;
        let address = listener.local_addr().map_err(refuse)?;
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        let serve = move || {
            for stream in listener.incoming() {
                if of_thread.is_over.load(Ordering::Relaxed) {
                    break;
                }
                // A client that fails asks again.
                let _ = stream.and_then(|stream| serve(stream, &of_thread));
            }
        };
        let thread = thread::Builder::new().name("prometheus".to_owned()).spawn(serve).map_err(refuse)?;
        Ok(PrometheusEndpoint { address, shared, thread: Some(thread) })
    }

    /// Shows this record from now on.
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
        // It waits for a connection. If none can be made, it ends with the process, and has nothing that could be lost.
        let woken = TcpStream::connect_timeout(&(here, self.address.port()).into(), CONNECTION_MAX);
        if woken.is_ok()
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

/// Reads one request and answers it.
fn serve(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    let deadline = Instant::now() + CONNECTION_MAX;
    let mut request = Vec::new();
    let mut chunk = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_BYTES_MAX {
            return Ok(());
        }
        stream.set_read_timeout(Some(left))?;
        let length = stream.read(&mut chunk)?;
        if length == 0 {
            return Ok(());
        }
        request.extend_from_slice(&chunk[..length]);
    }
    let (status, body) = match request.starts_with(b"GET /metrics ") {
        true => ("200 OK", shared.text().clone()),
        false => ("404 Not Found", "see /metrics\n".to_owned()),
    };
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    );
    // More fits the socket's buffer, so one write is enough of a bound.
    stream.set_write_timeout(Some(CONNECTION_MAX))?;
    stream.write_all(answer.as_bytes())
}

fn write_record(text: &mut String, record: &StepRecord) -> fmt::Result {
    let mut last = String::new();
    let mut result = write_number(text, &mut last, ("steps", None), record.step as f64);
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
            result = write_number(text, &mut last, (name, label), value);
        }
    });
    result
}

/// Writes a number with its label, and before the first one of its name its type. `last` is the name before.
fn write_number(
    text: &mut String,
    last: &mut String,
    (name, label): (&str, Option<(&str, &str)>),
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
        let get = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
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
        assert!(get("/").starts_with("HTTP/1.1 404"));
        assert!(PrometheusEndpoint::open(address).is_err(), "the port is in use");
        // A client that announces more than it sends holds nobody up.
        let mut slow = TcpStream::connect(address).unwrap();
        write!(slow, "POST /metrics HTTP/1.1\r\nContent-Length: 100000\r\n\r\nabc").unwrap();
        assert!(get("/metrics").contains("trireme_loss 2.5"));
        drop(endpoint);
        assert!(PrometheusEndpoint::open(address).is_ok());
    }
}
