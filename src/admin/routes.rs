//! The routes: what is read freely, and the orders behind their guard.

use super::{Limits, Published, access, page};
use super::{
    commands::{Order, Orders},
    run_info::Facts,
};
use crate::common::token::Token;
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, header},
    middleware::map_response,
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

/// The exposition format that `PrometheusHandle::render` writes.
const PROMETHEUS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// A reader of `/events` hears at least this often, so that it knows of a connection that broke in silence.
const SIGN_OF_LIFE: Duration = Duration::from_secs(5);
/// An order that takes longer goes on by itself, and the answer says so.
const ORDER: Duration = Duration::from_secs(60);

/// What the routes are made of.
pub struct Parts {
    pub metrics: PrometheusHandle,
    pub facts: watch::Receiver<Facts>,
    pub published: watch::Receiver<Published>,
    pub orders: Orders,
    pub token: Option<Token>,
    pub limits: Limits,
    pub shutdown: CancellationToken,
}

/// [`Parts`], shared by all requests.
pub struct Shared {
    parts: Parts,
    streams: Arc<Semaphore>,
}

impl Shared {
    pub fn new(parts: Parts) -> Arc<Shared> {
        Arc::new(Shared { streams: Arc::new(Semaphore::new(parts.limits.streams)), parts })
    }
}

/// Every route of the port.
pub fn router(shared: Arc<Shared>) -> Router {
    let order = |order| post(move |State(shared), request| give(order, shared, request));
    Router::new()
        .route("/", get(document))
        .route("/metrics", get(scrape))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readiness))
        .route("/status", get(status))
        .route("/events", get(events))
        .route("/reload", order(Order::Reload))
        .route("/checkpoint", order(Order::Checkpoint))
        .route("/pause", order(Order::Pause))
        .route("/resume", order(Order::Resume))
        .fallback(|| async { (StatusCode::NOT_FOUND, "there is no such page; the status page is /\n") })
        .layer(map_response(guarded))
        .with_state(shared)
}

/// Nothing here is to be kept, guessed at or framed.
async fn guarded(mut response: Response) -> Response {
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
    ([(header::CONTENT_TYPE, PROMETHEUS_TEXT)], shared.parts.metrics.render())
}

async fn readiness(State(shared): State<Arc<Shared>>) -> Response {
    // The wish to end is told at once, not at the next sample.
    let reason = match shared.parts.facts.borrow().stopping {
        true => Some("the run is ending"),
        false => shared.parts.published.borrow().status.not_ready(),
    };
    match reason {
        None => "ok\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn status(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let mut published = shared.parts.published.clone();
    // Only the first moments of a start have none.
    let json = published.wait_for(|published| published.id > 0).await.map(|published| published.json.to_string());
    ([(header::CONTENT_TYPE, "application/json")], json.unwrap_or_default())
}

async fn events(State(shared): State<Arc<Shared>>) -> Response {
    let Ok(place) = shared.streams.clone().try_acquire_owned() else {
        counter!(ADMIN_REFUSED, "reason" => "streams").increment(1);
        let sentence = "too many readers of /events; close a page, or read /status\n";
        return (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "10")], sentence).into_response();
    };
    Sse::new(changes(shared.parts.published.clone(), shared.parts.shutdown.clone(), place)).into_response()
}

/// The newest status at once and whenever it has changed, until the server ends. A reader that is slow misses what was in between.
fn changes(
    mut published: watch::Receiver<Published>,
    shutdown: CancellationToken,
    place: OwnedSemaphorePermit,
) -> impl Stream<Item = Result<Event, Infallible>> {
    published.mark_changed();
    stream::unfold((published, shutdown, place), |(mut published, shutdown, place)| async move {
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
                () = sleep(SIGN_OF_LIFE) => break Event::default().event("alive").data("yes"),
            }
        };
        Some((Ok(event), (published, shutdown, place)))
    })
}

async fn give(order: Order, shared: Arc<Shared>, request: Request<Body>) -> Response {
    let Parts { orders, token, limits, .. } = &shared.parts;
    let refused = |reason: &'static str| counter!(ADMIN_REFUSED, "reason" => reason).increment(1);
    let (head, body) = request.into_parts();
    if let Err(refusal) = access::admit(&head.headers, token.as_ref()) {
        refused(refusal.reason());
        let sentence = format!("{}\n", refusal.sentence());
        return match refusal {
            access::Refusal::Token => {
                let ask = [(header::WWW_AUTHENTICATE, "Bearer realm=\"draftmill\"")];
                (StatusCode::UNAUTHORIZED, ask, sentence).into_response()
            }
            access::Refusal::Origin | access::Refusal::Host => (StatusCode::FORBIDDEN, sentence).into_response(),
        };
    }
    match timeout(limits.body, axum::body::to_bytes(body, limits.body_bytes)).await {
        Ok(Ok(_)) => {}
        Ok(Err(_)) => {
            refused("body");
            return (StatusCode::PAYLOAD_TOO_LARGE, "an order has no body; leave it out\n").into_response();
        }
        Err(_) => {
            refused("body");
            return (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time; an order has none\n")
                .into_response();
        }
    }
    let (code, sentence) = match timeout(ORDER, orders.give(order)).await {
        Ok(Ok(sentence)) => (StatusCode::OK, sentence),
        Ok(Err(sentence)) => (StatusCode::CONFLICT, sentence),
        Err(_) => {
            (StatusCode::ACCEPTED, "the order was given and is not carried out yet; the page will show it".into())
        }
    };
    (code, format!("{sentence}\n")).into_response()
}
