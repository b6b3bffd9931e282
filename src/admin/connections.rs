//! Connections that are bounded in number and in patience: a client that sends or reads slowly costs itself alone.

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

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections; more are told so and closed.
    pub connections: usize,
    /// Readers of `/events` among them.
    pub streams: usize,
    /// For the head of a request to arrive whole, and between two requests.
    pub head: Duration,
    /// For the body of a request to arrive whole.
    pub body: Duration,
    /// For what was answered to be taken by the client.
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

/// For what is under way when the server ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Where the system has no more files for us, it may have some later.
const OUT_OF_FILES: Duration = Duration::from_millis(200);

const TOO_MANY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
    retry-after: 10\r\ncontent-length: 45\r\n\r\ntoo many connections; ask again in a moment.\n";

/// Answers until `shutdown`, then lets what is under way end.
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
                tracing::debug!(%error, "a connection to the admin port could not be taken");
                sleep(OUT_OF_FILES).await;
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
    let _ = timeout(LAST_WORDS, async { while open.join_next().await.is_some() {} }).await;
}

async fn refuse(mut stream: TcpStream) {
    counter!(ADMIN_REFUSED, "reason" => "connections").increment(1);
    // The buffer of a fresh connection takes this at once.
    let _ = timeout(Duration::from_millis(50), stream.write_all(TOO_MANY)).await;
}

async fn connection(stream: TcpStream, router: Router, limits: Limits, shutdown: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(limits.head_bytes);
    let io = TokioIo::new(Impatient::new(stream, limits.write));
    let mut serving = pin!(http.serve_connection(io, TowerToHyperService::new(router)));
    let ended = tokio::select! {
        ended = serving.as_mut() => ended,
        () = shutdown.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection to the admin port ended early");
    }
}

/// A stream that fails when what was written to it is not taken in time. The time runs from the first byte that finds no room
/// until everything is out, so that a client that takes a byte now and then gains nothing.
struct Impatient<S> {
    stream: S,
    patience: Duration,
    stuck: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    fn new(stream: S, patience: Duration) -> Self {
        Impatient { stream, patience, stuck: None }
    }

    /// Fails when the time is over; otherwise the task wakes when it will be.
    fn wait(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let patience = self.patience;
        let stuck = self.stuck.get_or_insert_with(|| Box::pin(sleep(patience)));
        match stuck.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.stuck.is_some() {
            self.wait(cx)?;
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if written.is_pending() {
            self.wait(cx)?;
        }
        written
    }

    /// Asked for when the last byte was written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.stuck = None;
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
    async fn a_client_that_reads_drop_by_drop_has_no_more_time_than_one_that_reads_nothing() {
        for drops in [false, true] {
            let (ours, mut theirs) = duplex(16);
            let mut stream = Impatient::new(ours, Duration::from_secs(10));
            let reading = tokio::spawn(async move {
                let mut byte = [0];
                while drops && theirs.read(&mut byte).await.is_ok_and(|n| n > 0) {
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
    async fn a_client_that_reads_is_served_for_as_long_as_it_likes() {
        let (ours, mut theirs) = duplex(16);
        let mut stream = Impatient::new(ours, Duration::from_secs(10));
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
    fn the_answer_to_one_too_many_has_the_length_that_it_says() {
        let text = std::str::from_utf8(TOO_MANY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
