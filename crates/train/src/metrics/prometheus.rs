//! The last record of a run over HTTP, as Prometheus reads it.

use super::{MetricsError, StepRecord};
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use tiny_http::{Header, Method, Response, Server};

/// Prometheus' text format (<https://prometheus.io/docs/instrumenting/exposition_formats>).
const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers requests for `/metrics` while it lives.
pub(super) struct PrometheusEndpoint {
    server: Arc<Server>,
    text: Arc<Mutex<String>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for PrometheusEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrometheusEndpoint({})", self.server.server_addr())
    }
}

impl PrometheusEndpoint {
    /// Listens at this address.
    ///
    /// # Errors
    /// If it is in use, or not this machine's.
    pub(super) fn open(address: SocketAddr) -> Result<Self, MetricsError> {
        let refuse = |reason| MetricsError::Listen { address, reason };
        let server = Server::http(address).map_err(|error| refuse(error.to_string()))?;
        let (server, text) = (Arc::new(server), Arc::<Mutex<String>>::default());
        let (of_thread, shown) = (Arc::clone(&server), Arc::clone(&text));
        let answer = move || of_thread.incoming_requests().for_each(|request| answer(request, &shown));
        let thread = thread::Builder::new().name("prometheus".to_owned()).spawn(answer);
        let thread = Some(thread.map_err(|error| refuse(error.to_string()))?);
        Ok(PrometheusEndpoint { server, text, thread })
    }

    /// Shows this record from now on.
    pub(super) fn show(&self, record: &StepRecord) {
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        text.clear();
        write_record(&mut text, record);
    }
}

impl Drop for PrometheusEndpoint {
    fn drop(&mut self) {
        self.server.unblock();
        if let Some(thread) = self.thread.take() {
            // It has nothing that could be lost.
            let _ = thread.join();
        }
    }
}

fn answer(request: tiny_http::Request, text: &Mutex<String>) {
    let is_known = request.url() == "/metrics" && *request.method() == Method::Get;
    let answered = if is_known {
        let text = text.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let kind = Header::from_bytes("Content-Type", CONTENT_TYPE).expect("a header of letters is valid");
        request.respond(Response::from_string(text).with_header(kind))
    } else {
        request.respond(Response::from_string("see /metrics\n").with_status_code(404))
    };
    // Who has gone needs no answer.
    drop(answered);
}

fn write_record(text: &mut String, record: &StepRecord) {
    let mut put = |kind: &str, name: &str, labels: &str, value: f64| {
        let value = if value.is_finite() { value.to_string() } else { "NaN".to_owned() };
        if labels.is_empty() || !text.contains(&format!("# TYPE trireme_{name} ")) {
            writeln!(text, "# TYPE trireme_{name} {kind}").expect("a string takes everything");
        }
        writeln!(text, "trireme_{name}{labels} {value}").expect("a string takes everything");
    };
    put("counter", "step", "", record.step as f64);
    put("counter", "samples", "", record.samples as f64);
    if let (Some(tokens), Some(speed)) = (record.tokens, record.tokens_per_second) {
        put("counter", "tokens", "", tokens as f64);
        put("gauge", "tokens_per_second", "", speed);
    }
    put("gauge", "samples_per_second", "", record.samples_per_second);
    put("gauge", "epoch", "", record.epoch);
    put("gauge", "loss", "", record.loss);
    put("gauge", "grad_norm", "", record.grad_norm);
    put("gauge", "learning_rate", "", record.lr);
    put("gauge", "step_seconds", "", record.step_seconds);
    put("gauge", "comm_seconds_exposed", "", record.comm_seconds_exposed);
    if let Some(loss) = record.validation_loss {
        put("gauge", "validation_loss", "", loss);
    }
    for (category, bytes) in record.memory_peak_bytes.named() {
        put("gauge", "memory_peak_bytes", &format!("{{category=\"{category}\"}}"), bytes as f64);
    }
    for (name, value) in record.metrics.iter() {
        put("gauge", "metric", &format!("{{name=\"{name}\"}}"), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write as _};
    use std::net::TcpStream;

    #[test]
    fn the_last_record_is_shown() {
        let endpoint = PrometheusEndpoint::open(([127, 0, 0, 1], 0).into()).unwrap();
        let address = endpoint.server.server_addr().to_ip().unwrap();
        let get = |path: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        assert!(get("/metrics").starts_with("HTTP/1.1 200"));
        let mut record = StepRecord { step: 3, loss: 2.5, grad_norm: f64::NAN, ..StepRecord::default() };
        record.metrics.push(("accuracy", 0.5));
        endpoint.show(&record);
        let shown = get("/metrics");
        for line in [
            "# TYPE trireme_step counter\ntrireme_step 3\n",
            "\ntrireme_loss 2.5\n",
            "\ntrireme_grad_norm NaN\n",
            "\ntrireme_memory_peak_bytes{category=\"total\"} 0\n",
            "\ntrireme_metric{name=\"accuracy\"} 0.5\n",
        ] {
            assert!(shown.contains(line), "{shown}");
        }
        assert_eq!(shown.matches("# TYPE trireme_memory_peak_bytes").count(), 1);
        assert!(get("/").starts_with("HTTP/1.1 404"));
        assert!(PrometheusEndpoint::open(address).is_err(), "the port is in use");
        drop(endpoint);
        assert!(PrometheusEndpoint::open(address).is_ok());
    }
}
