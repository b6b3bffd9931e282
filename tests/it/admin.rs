//! Admin port over raw sockets: responses, refusals, and slow clients.

use crate::train::{Run, SLOW, text};
use draftmill::{
    admin::{
        self, Limits, Server,
        commands::{self, Command, Request},
        run_info::RunInfo,
    },
    common::token::Token,
};
use draftmill_actors::runtime::metrics as m;
use metrics::{counter, gauge};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::Value;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

const SECRET: &str = "a-token-of-the-tests-0123";
/// Time limit of a wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Server with a thread-local metrics recorder.
struct World {
    address: SocketAddr,
    metrics: PrometheusHandle,
    info: watch::Sender<RunInfo>,
    requests: Option<mpsc::Receiver<Request>>,
    shutdown: CancellationToken,
    running: JoinHandle<()>,
    _recorder: metrics::LocalRecorderGuard<'static>,
}

impl World {
    async fn new(limits: Limits, token: Option<&str>) -> World {
        let histograms = m::TABLE.iter().filter(|spec| !spec.buckets.is_empty());
        let recorder = admin::recorder(&histograms.map(|spec| (spec.name, spec.buckets)).collect::<Vec<_>>()).unwrap();
        let metrics = recorder.handle();
        // Leaked, because the guard borrows it.
        let guard = metrics::set_default_local_recorder(Box::leak(Box::new(recorder)));
        m::register(&m::Known { targets: 1, drafters: 1, buckets: vec![64, 128], ..m::Known::default() });
        let listener = admin::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (info, readers) = watch::channel(RunInfo { planned_steps: 10, ..RunInfo::default() });
        let (_, faults) = watch::channel(Default::default());
        let (commands, requests) = commands::channel();
        let (token, shutdown) = (token.map(Token::new), CancellationToken::new());
        let server = Server { listener, metrics: metrics.clone(), info: readers, faults, commands, token, limits };
        let running = tokio::spawn(server.run(shutdown.clone()));
        World { address, metrics, info, requests: Some(requests), shutdown, running, _recorder: guard }
    }

    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends one request on a new connection; returns the whole response.
    async fn ask(&self, request: &str, fields: &str) -> String {
        let mut stream = self.connect().await;
        let host = if fields.contains("Host:") { "" } else { "Host: localhost\r\n" };
        let head = format!("{request} HTTP/1.1\r\n{host}Connection: close\r\n{fields}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        rest(&mut stream).await
    }

    async fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path}"), "").await
    }

    async fn status(&self) -> Value {
        let answer = self.get("/status").await;
        serde_json::from_str(body(&answer)).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    /// Sends this reply to each command; ends after four.
    fn answer(&mut self, answer: Result<&'static str, &'static str>) -> JoinHandle<Vec<Command>> {
        let mut requests = self.requests.take().unwrap();
        tokio::spawn(async move {
            let mut commands = Vec::new();
            while let Some(request) = requests.recv().await {
                commands.push(request.command);
                request.reply.send(answer.map(str::to_owned).map_err(str::to_owned)).unwrap();
                if commands.len() == 4 {
                    break;
                }
            }
            commands
        })
    }

    fn refused(&self, reason: &str) -> f64 {
        admin::Samples::parse(&self.metrics.render()).with(m::ADMIN_REFUSED, &[("reason", reason)])
    }

    async fn accepts_a_reader(&self) -> bool {
        let mut text = String::new();
        read_until(&mut self.events().await, &mut text, "\r\n\r\n", 1).await;
        text.starts_with("HTTP/1.1 200")
    }

    /// Opens `/events`.
    async fn events(&self) -> TcpStream {
        let mut stream = self.connect().await;
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        stream
    }
}

/// Remaining data of a connection until it ends.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    let reading = async {
        while let Ok(n) = stream.read(&mut buffer).await {
            if n == 0 {
                break;
            }
            bytes.extend_from_slice(&buffer[..n]);
        }
    };
    timeout(TIMEOUT, reading).await.expect("the server ends the connection");
    String::from_utf8(bytes).unwrap()
}

/// Reads until `text` contains `part` this many times.
async fn read_until(stream: &mut TcpStream, text: &mut String, part: &str, times: usize) {
    let mut buffer = [0; 4096];
    while text.matches(part).count() < times {
        let n = timeout(TIMEOUT, stream.read(&mut buffer)).await.expect("something comes").unwrap();
        assert!(n > 0, "the connection ended after {text}");
        text.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
}

/// Polls until the condition holds.
async fn eventually(what: &str, ask: impl AsyncFn() -> bool) {
    let asking = async {
        while !ask().await {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, asking).await.unwrap_or_else(|_| panic!("timeout: {what}"));
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

fn is(answer: &str, code: u16) {
    assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")), "not {code}: {answer}");
}

#[tokio::test]
async fn reads_need_no_token_and_have_security_headers() {
    let world = World::new(Limits::default(), None).await;
    gauge!(m::TARGET_UP, "index" => "0").set(1.0);
    counter!(m::JOBS, "outcome" => "trained").increment(3);
    let metrics = world.get("/metrics").await;
    is(&metrics, 200);
    for line in ["content-type: text/plain; version=0.0.4", "draftmill_jobs_total{outcome=\"trained\"} 3\n"] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    assert_eq!(body(&world.get("/livez").await), "ok\n");
    let page = world.get("/").await;
    is(&page, 200);
    assert!(page.contains("content-type: text/html") && page.contains("script-src 'sha256-"), "{page}");
    let missing = world.get("/nothing").await;
    is(&missing, 404);
    for answer in [&metrics, &page, &missing, &world.get("/status").await] {
        for field in
            ["cache-control: no-store", "x-content-type-options: nosniff", "content-security-policy: default-src"]
        {
            assert!(answer.contains(field), "{field} is not in {answer}");
        }
        assert!(!answer.contains("access-control-allow"), "{answer}");
    }
    is(&world.get("/pause").await, 405);
    let status = world.status().await;
    assert_eq!((&status["jobs"]["trained"], &status["progress"]["planned_steps"]), (&3.into(), &10.into()), "{status}");
}

#[tokio::test]
async fn readiness_ends_without_targets_and_at_shutdown() {
    let world = World::new(Limits::default(), None).await;
    let starting = world.get("/readyz").await;
    is(&starting, 503);
    gauge!(m::ACTOR_STATE, "actor" => "target", "index" => "0", "state" => "down").set(1.0);
    eventually("no target", async || world.get("/readyz").await.contains("no target")).await;
    let out = world.get("/readyz").await;
    is(&out, 503);
    assert_eq!(body(&out), "no target is in service\n");
    gauge!(m::TARGET_UP, "index" => "0").set(1.0);
    eventually("ready", async || world.get("/readyz").await.ends_with("\r\n\r\nok\n")).await;
    world.info.send_modify(|info| info.stopping = true);
    let ending = world.get("/readyz").await;
    is(&ending, 503);
    assert_eq!(body(&ending), "the run is ending\n");
    assert_eq!(body(&world.get("/livez").await), "ok\n", "a process that shuts down is alive");
}

#[tokio::test]
async fn commands_are_executed_or_refused_with_a_reason() {
    let mut world = World::new(Limits::default(), None).await;
    let executed = world.answer(Ok("done"));
    for path in ["/reload", "/checkpoint", "/pause", "/resume"] {
        let answer = world.ask(&format!("POST {path}"), "Content-Length: 0\r\n").await;
        is(&answer, 200);
        assert_eq!(body(&answer), "done\n");
    }
    assert_eq!(executed.await.unwrap(), [Command::Reload, Command::Checkpoint, Command::Pause, Command::Resume]);
    // The receiver is gone.
    let late = world.ask("POST /pause", "").await;
    is(&late, 409);
    assert_eq!(body(&late), "the run is ending\n");

    let mut world = World::new(Limits::default(), None).await;
    let _taken = world.answer(Err("a checkpoint is being written already"));
    let refused = world.ask("POST /checkpoint", "").await;
    is(&refused, 409);
    assert_eq!(body(&refused), "a checkpoint is being written already\n");
}

#[tokio::test]
async fn commands_of_other_sites_and_wrong_tokens_are_refused() {
    let world = World::new(Limits::default(), None).await;
    let own = world.address.to_string();
    for (fields, reason) in [
        ("Origin: http://evil.example\r\n".to_owned(), "origin"),
        (format!("Host: {own}\r\nOrigin: http://127.0.0.1:1\r\n"), "origin"),
        (format!("Host: {own}\r\nSec-Fetch-Site: cross-site\r\n"), "origin"),
        ("Host: evil.example\r\nOrigin: http://evil.example\r\n".to_owned(), "host"),
    ] {
        let before = world.refused(reason);
        is(&world.ask("POST /pause", &fields).await, 403);
        assert_eq!(world.refused(reason), before + 1.0, "{fields}");
    }
    // Issue 17, E16: a page of another site could read under a name of its choice (DNS rebinding).
    for path in ["/status", "/metrics", "/events", "/", "/livez"] {
        is(&world.ask(&format!("GET {path}"), "Host: evil.example\r\n").await, 403);
        assert!(!world.ask(&format!("GET {path}"), "Host: evil.example\r\n").await.contains("draftmill_"));
    }
    is(&world.get("/status").await, 200);

    let mut world = World::new(Limits::default(), Some(SECRET)).await;
    let _taken = world.answer(Ok("paused"));
    let bare = world.ask("POST /pause", "").await;
    is(&bare, 401);
    assert!(bare.contains("www-authenticate: Bearer"), "{bare}");
    is(&world.ask("POST /pause", "Authorization: Bearer a-token-of-the-tests-0124\r\n").await, 401);
    assert_eq!(world.refused("token"), 2.0);
    let right = format!("Host: draftmill.example:9464\r\nAuthorization: Bearer {SECRET}\r\n");
    is(&world.ask("POST /pause", &right).await, 200);
    is(&world.ask("POST /pause", &format!("{right}Origin: https://evil.example\r\n")).await, 403);
    is(&world.ask("POST /pause", &format!("{right}Origin: http://draftmill.example:9464\r\n")).await, 200);
    // With a token, reads are public under any name.
    is(&world.ask("GET /status", "Host: draftmill.example\r\n").await, 200);
}

/// Issue 17, E16.
#[tokio::test]
async fn e16_a_reader_of_events_that_never_reads_loses_its_place() {
    let limits = Limits { streams: 1, write: Duration::from_secs(1), ..Limits::default() };
    let world = World::new(limits, None).await;
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stalled = socket.connect(world.address).await.unwrap();
    stalled.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    stalled.readable().await.unwrap();
    assert!(!world.accepts_a_reader().await, "the place is taken");
    let mut changes = 0;
    let waiting = async {
        while !world.accepts_a_reader().await {
            changes += 1;
            world.info.send_modify(|info| info.dir = format!("{changes}{}", "x".repeat(200_000)));
            sleep(Duration::from_millis(200)).await;
        }
    };
    timeout(TIMEOUT, waiting).await.expect("the place is free again");
    drop(stalled);
}

#[tokio::test]
async fn events_start_with_the_status_and_follow_every_change() {
    let world = World::new(Limits::default(), None).await;
    for begin in [1, 2] {
        let mut stream = world.events().await;
        let mut text = String::new();
        read_until(&mut stream, &mut text, "\n\n", 1).await;
        assert!(text.contains("content-type: text/event-stream") && text.contains("event: status\n"), "{text}");
        let first: u64 = after(&text, "id: ").parse().unwrap();
        gauge!(m::QUEUE_JOBS).set(f64::from(begin));
        let next = format!("id: {}\n", first + 1);
        read_until(&mut stream, &mut text, &next, 1).await;
        let (_, mut event) = text.split_once(&next).map(|(before, after)| (before, after.to_owned())).unwrap();
        if !event.contains("\n\n") {
            read_until(&mut stream, &mut event, "\n\n", 1).await;
        }
        let pushed: Value = serde_json::from_str(after(&event, "data: ")).unwrap_or_else(|e| panic!("{e}: {event}"));
        assert_eq!(pushed["queue"]["jobs"], begin, "{event}");
        assert_eq!(pushed, world.status().await, "/events and /status agree");
    }
}

/// Rest of the line after the first `mark`.
fn after<'a>(text: &'a str, mark: &str) -> &'a str {
    text.split_once(mark).and_then(|(_, rest)| rest.lines().next()).unwrap_or_default()
}

#[tokio::test]
async fn readers_of_events_are_limited_and_end_at_shutdown() {
    let world = World::new(Limits { streams: 2, ..Limits::default() }, None).await;
    let (mut one, two) = (world.events().await, world.events().await);
    let mut text = String::new();
    read_until(&mut one, &mut text, "\n\n", 1).await;
    let third = world.get("/events").await;
    is(&third, 503);
    assert!(third.contains("too many readers") && world.refused("streams") == 1.0, "{third}");
    drop(two);
    // The server detects the closed connection at its next write.
    eventually("a free permit", async || {
        gauge!(m::QUEUE_JOBS).increment(1.0);
        world.accepts_a_reader().await
    })
    .await;
    world.shutdown.cancel();
    rest(&mut one).await;
    timeout(TIMEOUT, world.running).await.unwrap().unwrap();
    assert!(TcpStream::connect(world.address).await.is_err());
}

#[tokio::test]
async fn slow_request_heads_time_out() {
    let limits = Limits { head: Duration::from_millis(300), ..Limits::default() };
    let world = World::new(limits, None).await;
    let mut slow = Vec::new();
    for _ in 0..20 {
        let mut stream = world.connect().await;
        stream.write_all(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: ").await.unwrap();
        slow.push(stream);
    }
    is(&world.get("/livez").await, 200);
    for mut stream in slow {
        // Single bytes do not extend the timeout.
        let trickle = async {
            while stream.write_all(b"a").await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, trickle).await.expect("the server ends the connection");
    }
    let mut silent = world.connect().await;
    assert_eq!(rest(&mut silent).await, "", "a silent client times out too");
}

#[tokio::test]
async fn heads_and_bodies_have_a_limit() {
    // A long head timeout, so that the size limit ends the connection.
    let limits = Limits { body: Duration::from_millis(300), head: 10 * TIMEOUT, ..Limits::default() };
    let world = World::new(limits, None).await;
    let mut stream = world.connect().await;
    let head = format!("GET /status HTTP/1.1\r\nHost: localhost\r\nX-Long: {}", "a".repeat(64 << 10));
    let _ = stream.write_all(head.as_bytes()).await;
    let answer = rest(&mut stream).await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    let mut stream = world.connect().await;
    let command =
        format!("POST /pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000\r\n\r\n{}", "a".repeat(2000));
    stream.write_all(command.as_bytes()).await.unwrap();
    let mut text = String::new();
    read_until(&mut stream, &mut text, "\n", 1).await;
    is(&text, 413);
    // A declared body that never arrives.
    is(&world.ask("POST /pause", "Content-Length: 10\r\n").await, 408);
    assert_eq!(world.refused("body"), 2.0);
}

#[tokio::test]
async fn connections_are_limited() {
    let world = World::new(Limits { connections: 3, ..Limits::default() }, None).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut stream = world.connect().await;
        stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        let mut text = String::new();
        read_until(&mut stream, &mut text, "ok\n", 1).await;
        open.push(stream);
    }
    let mut fourth = world.connect().await;
    let answer = rest(&mut fourth).await;
    is(&answer, 503);
    assert!(answer.contains("too many connections") && world.refused("connections") == 1.0, "{answer}");
    drop(open);
    eventually("a free connection", async || world.get("/livez").await.starts_with("HTTP/1.1 200")).await;
}

/// A client that never reads loses the only permit once the server's buffers are full.
#[tokio::test]
async fn a_client_that_never_reads_events_is_dropped() {
    let limits = Limits { streams: 1, write: Duration::from_millis(500), ..Limits::default() };
    let world = World::new(limits, None).await;
    let mut stalled = world.events().await;
    let mut text = String::new();
    read_until(&mut stalled, &mut text, "\n\n", 1).await;
    eventually("the permit is free", async || {
        // Grows beyond the socket buffers of both ends.
        world.info.send_modify(|info| info.dir.push_str(&"x".repeat(1 << 20)));
        is(&world.get("/livez").await, 200);
        world.accepts_a_reader().await
    })
    .await;
    drop(stalled);
}

#[test]
fn a_public_port_needs_a_token() {
    let run = Run::new(SLOW);
    let open = ["--set", "admin.listen=0.0.0.0:0"];
    let refused = run.train(&open);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused));
    assert!(text(&refused).contains("admin.token_file = \"\": admin.listen = \"0.0.0.0:0\""), "{}", text(&refused));
    let empty = run.dir().join("token");
    std::fs::write(&empty, "\n").unwrap();
    let file = format!("admin.token_file={}", empty.display());
    let refused = run.train(&[&open[..], &["--set", &file]].concat());
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused));
    assert!(text(&refused).contains("it holds no token"), "{}", text(&refused));
    std::fs::write(&empty, SECRET).unwrap();
    let trained = run.train(&[&open[..], &["--set", &file]].concat());
    assert_eq!(trained.status.code(), Some(0), "{}", text(&trained));
    assert!(!text(&trained).contains(SECRET), "the log must not contain the token");
}
