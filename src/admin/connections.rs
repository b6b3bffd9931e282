//! Limits the number of connections and applies read and write timeouts, so that slow clients do not affect others.

use axum::Router;
use draftmill_actors::runtime::metrics::ADMIN_REFUSED;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use metrics::counter;
use std::{
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Sleep, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Limits for clients.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections; further ones get status 503.
    pub connections: usize,
    /// Connections that read `/events`.
    pub streams: usize,
    /// Time to receive the head of a request, and between two requests.
    pub head: Duration,
    /// Time to receive the body of a request.
    pub body: Duration,
    /// Time for the client to read a response.
    pub write: Duration,
    /// Bytes of a request's head.
    pub head_bytes: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 64,
            streams: 16,
            head: Duration::from_secs(10),
            body: Duration::from_secs(5),
            write: Duration::from_secs(10),
            head_bytes: 16 << 10,
            body_bytes: 1 << 10,
        }
    }
}

/// Time for open requests when the server shuts down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a failed accept: the process may be out of file descriptors for a moment.
const ACCEPT_RETRY: Duration = Duration::from_millis(200);

const TOO_MANY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
    retry-after: 10\r\ncontent-length: 45\r\n\r\ntoo many connections; try again in a moment.\n";

/// Serves connections until `shutdown`, then waits for open requests, at most 1 s.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, shutdown: CancellationToken) {
    let free = Arc::new(Semaphore::new(limits.connections));
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            Some(_) = open.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "admin connection not accepted");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        match free.clone().try_acquire_owned() {
            Ok(permit) => {
                let (router, shutdown) = (router.clone(), shutdown.clone());
                open.spawn(async move {
                    connection(stream, router, limits, shutdown).await;
                    drop(permit);
                });
            }
            Err(_) => refuse(stream).await,
        }
    }
    drop(listener);
    let _ = timeout(SHUTDOWN_TIMEOUT, async { while open.join_next().await.is_some() {} }).await;
}

async fn refuse(mut stream: TcpStream) {
    counter!(ADMIN_REFUSED, "reason" => "connections").increment(1);
    // The send buffer of a new connection is empty, so this does not block.
    let _ = timeout(Duration::from_millis(50), stream.write_all(TOO_MANY)).await;
}

async fn connection(stream: TcpStream, router: Router, limits: Limits, shutdown: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    // A client that has sent its request may close its side (`printf ... | nc`) and still reads the response.
    http.half_close(true);
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(limits.head_bytes);
    let io = TokioIo::new(WriteTimeout::new(stream, limits.write));
    let mut serving = pin!(http.serve_connection(io, TowerToHyperService::new(router)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = shutdown.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "admin connection ended early");
    }
}

/// Stream with a write timeout. The time runs from the first blocked byte until everything is written, so a client that
/// reads a byte now and then does not extend it.
struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    fn new(stream: S, limit: Duration) -> Self {
        WriteTimeout { stream, limit, timer: None }
    }

    /// Fails after the timeout; before that, registers the task to wake at the timeout.
    fn wait(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        match timer.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::new(io::ErrorKind::TimedOut, "client does not read")),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.timer.is_some() {
            self.wait(cx)?;
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if written.is_pending() {
            self.wait(cx)?;
        }
        written
    }

    /// Called after the last byte; a completed flush resets the timer.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.timer = None;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::{
        io::{AsyncReadExt, duplex},
        time::Instant,
    };

    #[tokio::test(start_paused = true)]
    async fn slow_reading_does_not_extend_the_write_timeout() {
        for slow in [false, true] {
            let (ours, mut theirs) = duplex(16);
            let mut stream = WriteTimeout::new(ours, Duration::from_secs(10));
            let reading = tokio::spawn(async move {
                let mut byte = [0];
                while slow && theirs.read(&mut byte).await.is_ok_and(|n| n > 0) {
                    sleep(Duration::from_secs(1)).await;
                }
                std::future::pending::<()>().await;
                drop(theirs);
            });
            let begun = Instant::now();
            let error = stream.write_all(&[7; 1000]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert!((10..=11).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
            reading.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reading_client_has_no_total_time_limit() {
        let (ours, mut theirs) = duplex(16);
        let mut stream = WriteTimeout::new(ours, Duration::from_secs(10));
        let reading = tokio::spawn(async move {
            let mut all = Vec::new();
            theirs.read_to_end(&mut all).await.unwrap();
            all.len()
        });
        for _ in 0..20 {
            stream.write_all(&[7; 100]).await.unwrap();
            stream.flush().await.unwrap();
            sleep(Duration::from_secs(9)).await;
        }
        drop(stream);
        assert_eq!(reading.await.unwrap(), 2000);
    }

    #[test]
    fn the_refusal_has_a_correct_content_length() {
        let text = std::str::from_utf8(TOO_MANY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
