//! HTTP routes: public reads, and commands behind access control.

use super::{Limits, Published, access, page};
use super::{
    commands::{Command, Commands},
    run_info::RunInfo,
};
use crate::common::token::Token;
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::{Next, from_fn_with_state, map_response},
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::{get, post},
};
use draftmill_actors::runtime::metrics::ADMIN_REFUSED;
use futures_util::{Stream, stream};
use metrics::counter;
use metrics_exporter_prometheus::PrometheusHandle;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// Content type of `PrometheusHandle::render`.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Interval of heartbeats on `/events`, by which a client detects a dead connection.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Time limit of a response to a command. A slower command continues; the response has status 202.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Inputs of the routes.
pub struct Context {
    pub metrics: PrometheusHandle,
    pub info: watch::Receiver<RunInfo>,
    pub published: watch::Receiver<Published>,
    pub commands: Commands,
    pub token: Option<Token>,
    pub limits: Limits,
    pub shutdown: CancellationToken,
}

/// [`Context`] and stream permits, shared by all requests.
pub struct Shared {
    context: Context,
    streams: Arc<Semaphore>,
}

impl Shared {
    pub fn new(context: Context) -> Arc<Shared> {
        Arc::new(Shared { streams: Arc::new(Semaphore::new(context.limits.streams)), context })
    }
}

/// Every route of the port.
pub fn router(shared: Arc<Shared>) -> Router {
    let command = |command| post(move |State(shared), request| execute(command, shared, request));
    Router::new()
        .route("/", get(document))
        .route("/metrics", get(scrape))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readiness))
        .route("/status", get(status))
        .route("/events", get(events))
        .route("/reload", command(Command::Reload))
        .route("/checkpoint", command(Command::Checkpoint))
        .route("/pause", command(Command::Pause))
        .route("/resume", command(Command::Resume))
        .fallback(|| async { (StatusCode::NOT_FOUND, "not found; the status page is /\n") })
        .layer(map_response(security_headers))
        .layer(from_fn_with_state(shared.clone(), check_host))
        .with_state(shared)
}

/// Refuses a read whose Host header is not this machine's, if there is no token: only this machine reaches the port then, so
/// the name is one that a page of another site chose (DNS rebinding).
async fn check_host(State(shared): State<Arc<Shared>>, request: Request<Body>, next: Next) -> Response {
    if shared.context.token.is_none() && !access::is_local(request.headers()) {
        let refusal = access::Refusal::Host;
        counter!(ADMIN_REFUSED, "reason" => refusal.reason()).increment(1);
        return (StatusCode::FORBIDDEN, format!("{}\n", refusal.sentence())).into_response();
    }
    next.run(request).await
}

/// Adds headers against caching, content sniffing and framing.
async fn security_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"));
    response
}

async fn document() -> impl IntoResponse {
    let headers =
        [(header::CONTENT_TYPE, "text/html; charset=utf-8"), (header::CONTENT_SECURITY_POLICY, page::POLICY.as_str())];
    (headers, page::DOCUMENT.as_str())
}

async fn scrape(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, PROMETHEUS_TEXT)], shared.context.metrics.render())
}

async fn readiness(State(shared): State<Arc<Shared>>) -> Response {
    // A shutdown is reported at once, not at the next sample.
    let reason = match shared.context.info.borrow().stopping {
        true => Some("the run is ending"),
        false => shared.context.published.borrow().status.not_ready(),
    };
    match reason {
        None => "ok\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn status(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let mut published = shared.context.published.clone();
    // The first status is published within a second of the start.
    let json = published.wait_for(|published| published.id > 0).await.map(|published| published.json.to_string());
    ([(header::CONTENT_TYPE, "application/json")], json.unwrap_or_default())
}

async fn events(State(shared): State<Arc<Shared>>) -> Response {
    let Ok(permit) = shared.streams.clone().try_acquire_owned() else {
        counter!(ADMIN_REFUSED, "reason" => "streams").increment(1);
        let sentence = "too many readers of /events; close a status page, or read /status\n";
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "10")], sentence).into_response();
    };
    Sse::new(changes(shared.context.published.clone(), shared.context.shutdown.clone(), permit)).into_response()
}

/// Event stream: the current status, then every change until the server shuts down. A slow reader skips intermediate ones.
fn changes(
    mut published: watch::Receiver<Published>,
    shutdown: CancellationToken,
    permit: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<Event, Infallible>> {
    published.mark_changed();
    stream::unfold((published, shutdown, permit), |(mut published, shutdown, permit)| async move {
        let event = loop {
            tokio::select! {
                () = shutdown.cancelled() => return None,
                changed = published.changed() => {
                    changed.ok()?;
                    let newest = published.borrow_and_update();
                    if newest.id > 0 {
                        break Event::default().event("status").id(newest.id.to_string()).data(&*newest.json);
                    }
                }
                () = sleep(HEARTBEAT) => break Event::default().event("alive").data("yes"),
            }
        };
        Some((Ok(event), (published, shutdown, permit)))
    })
}

async fn execute(command: Command, shared: Arc<Shared>, request: Request<Body>) -> Response {
    let Context { commands, token, limits, .. } = &shared.context;
    let refused = |reason: &'static str| counter!(ADMIN_REFUSED, "reason" => reason).increment(1);
    let (head, body) = request.into_parts();
    if let Err(refusal) = access::admit(&head.headers, token.as_ref()) {
        refused(refusal.reason());
        let sentence = format!("{}\n", refusal.sentence());
        return match refusal {
            access::Refusal::Token => {
                let challenge = [(header::WWW_AUTHENTICATE, "Bearer realm=\"draftmill\"")];
                (StatusCode::UNAUTHORIZED, challenge, sentence).into_response()
            }
            access::Refusal::Origin | access::Refusal::Host => (StatusCode::FORBIDDEN, sentence).into_response(),
        };
    }
    match timeout(limits.body, axum::body::to_bytes(body, limits.body_bytes)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => {
            refused("body");
            return (StatusCode::PAYLOAD_TOO_LARGE, "a command has no body\n").into_response();
        }
        Err(_) => {
            refused("body");
            return (StatusCode::REQUEST_TIMEOUT, "timeout while reading the body; a command has none\n")
                .into_response();
        }
    }
    let (code, sentence) = match timeout(COMMAND_TIMEOUT, commands.send(command)).await {
        Ok(Ok(sentence)) => (StatusCode::OK, sentence),
        Ok(Err(sentence)) => (StatusCode::CONFLICT, sentence),
        Err(_) => (
            StatusCode::ACCEPTED,
            "the command is accepted and not executed yet; the status page shows its result".into(),
        ),
    };
    (code, format!("{sentence}\n")).into_response()
}
