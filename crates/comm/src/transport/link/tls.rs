//! Encrypted links: TLS 1.3 (RFC 8446) by rustls, with certificates on both sides.
//!
//! Unlike other links, a TLS link costs a copy and an allocation of up to 16 KiB per record on both sides.

use super::{ConnectionSide, Interest};
use crate::secret::read_private;
use crate::{CommError, TlsOptions};
use rustix::event::PollFlags;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use trireme_base::read_at_most;

/// Maximum bytes of a certificate or key file.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Maximum bytes that are encrypted before they are sent.
const ENCRYPTED_BYTES_MAX: usize = 64 << 10;
/// Label of the keying material that [`TlsLink::export`] derives from a connection (RFC 5705).
const EXPORT_LABEL: &[u8] = b"EXPORTER-trireme";

/// The TLS configuration of this process.
#[derive(Clone)]
pub(crate) struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
    name: ServerName<'static>,
}

impl Tls {
    pub(crate) fn read(options: &TlsOptions) -> Result<Self, CommError> {
        let TlsOptions { certificate, key, authority, name } = options;
        let in_file =
            |path: &Path, source| CommError::TlsFile { path: path.to_owned(), source: Arc::new(source) };
        let chain = read_certificates(certificate).map_err(|error| in_file(certificate, error))?;
        let private = read_key(key).map_err(|error| in_file(key, error))?;
        let roots = read_authorities(authority).map_err(|error| in_file(authority, error))?;
        let name = ServerName::try_from(name.clone()).map_err(|_| CommError::Options {
            what: format!("the TLS name is '{name}'; it must be a DNS name, such as trireme"),
        })?;
        let (client, server) =
            configure(chain, private, roots).map_err(|error| in_file(certificate, error))?;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server), name })
    }

    /// Starts TLS on a connected stream socket. The handshake, [`TlsLink::continue_handshake`], must complete before other calls.
    pub(crate) fn start(&self, socket: OwnedFd, side: ConnectionSide) -> io::Result<TlsLink> {
        let mut connection: Connection = match side {
            ConnectionSide::Connecting => ClientConnection::new(Arc::clone(&self.client), self.name.clone())
                .map_err(io::Error::other)?
                .into(),
            ConnectionSide::Accepting => {
                ServerConnection::new(Arc::clone(&self.server)).map_err(io::Error::other)?.into()
            }
        };
        connection.set_buffer_limit(Some(ENCRYPTED_BYTES_MAX));
        Ok(TlsLink { socket, connection, num_encrypted: 0 })
    }
}

fn configure(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    roots: RootCertStore,
) -> io::Result<(ClientConfig, ServerConfig)> {
    let (provider, roots) = (Arc::new(ring::default_provider()), Arc::new(roots));
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
        .build()
        .map_err(io::Error::other)?;
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(io::Error::other)?;
    // Connections are never resumed.
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(io::Error::other)?;
    client.resumption = Resumption::disabled();
    Ok((client, server))
}

fn read_certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let bytes = read_at_most(path, FILE_BYTES_MAX as u64)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(io::Error::other)?;
    if found.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it contains no certificate in PEM form"));
    }
    Ok(found)
}

fn read_key(path: &Path) -> io::Result<PrivateKeyDer<'static>> {
    let text = read_private(path, FILE_BYTES_MAX)?;
    PrivateKeyDer::from_pem_slice(text.as_bytes()).map_err(io::Error::other)
}

fn read_authorities(path: &Path) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        roots.add(certificate).map_err(io::Error::other)?;
    }
    Ok(roots)
}

pub(crate) struct TlsLink {
    socket: OwnedFd,
    connection: Connection,
    /// Bytes that [`send`](TlsLink::send) has accepted and encrypted, but not reported as sent.
    num_encrypted: usize,
}

/// The unencrypted socket, as a reader and writer for rustls.
struct Plain<'a>(BorrowedFd<'a>);

impl Read for Plain<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (_, num_read) = recv(self.0, bytes, RecvFlags::DONTWAIT)?;
        Ok(num_read)
    }
}

impl Write for Plain<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(send(self.0, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl TlsLink {
    /// Continues the handshake. Returns the event to wait for before the next call, or `None` once the handshake is complete.
    pub(crate) fn continue_handshake(&mut self) -> io::Result<Option<Interest>> {
        loop {
            if !self.flush()? {
                return Ok(Some(Interest::Send));
            }
            if !self.connection.is_handshaking() {
                return Ok(None);
            }
            if !self.read_records()? {
                return Ok(Some(Interest::Receive));
            }
        }
    }

    /// Keying material that only the two ends of this connection can derive.
    pub(crate) fn export(&self) -> io::Result<[u8; 32]> {
        self.connection.export_keying_material([0; 32], EXPORT_LABEL, None).map_err(io::Error::other)
    }

    /// Sends as many bytes as possible and returns their number. Bytes count as sent once all their records are sent, so no record stays
    /// behind.
    pub(crate) fn send(&mut self, header: &[u8], payload: &[u8]) -> io::Result<usize> {
        if self.num_encrypted == 0 {
            let slices = [IoSlice::new(header), IoSlice::new(payload)];
            self.num_encrypted = self.connection.writer().write_vectored(&slices)?;
        }
        if !self.flush()? {
            return Ok(0);
        }
        Ok(std::mem::take(&mut self.num_encrypted))
    }

    /// Receives the bytes that have arrived and returns their number.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.reader().read(bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(num_read) => return Ok(num_read),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            if !self.read_records()? {
                return Ok(0);
            }
        }
    }

    /// The file descriptor and the events to poll. Call [`receive`](TlsLink::receive) first: decrypted bytes do not make the socket
    /// readable.
    pub(crate) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        let flags = match interest {
            Interest::Send => PollFlags::OUT,
            Interest::Receive => PollFlags::IN,
        };
        (self.socket.as_fd(), flags)
    }

    /// Sends pending records. Returns whether all were sent.
    fn flush(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Plain(self.socket.as_fd())) {
                Ok(_) => {}
                Err(error) if is_transient(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads records from the socket. Returns whether any bytes had arrived.
    fn read_records(&mut self) -> io::Result<bool> {
        match self.connection.read_tls(&mut Plain(self.socket.as_fd())) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side hung up")),
            Ok(_) => {}
            Err(error) if is_transient(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
        if let Err(error) = self.connection.process_new_packets() {
            // Sends an alert that tells the peer the reason, best effort.
            let _ = self.flush();
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        Ok(true)
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
