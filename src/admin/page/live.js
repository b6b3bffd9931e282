// The stream of statuses, and the orders.

// The server gives a sign of life every five seconds.
const SILENCE = 15000;
const AGAIN = 2000;
const READ = 20000;

let status = null;
let newest = null;
// Between the server's clock and this one, in seconds.
let offset = 0;
let heard = 0;
let source = null;
let lost = false;

const clock = () => Date.now() / 1000 + offset;

function announce(text) {
  put($("announced"), text);
}

function open() {
  source = new EventSource("/events");
  heard = Date.now();
  source.addEventListener("status", (event) => {
    heard = Date.now();
    const before = status;
    status = JSON.parse(event.data);
    newest = event.lastEventId;
    offset = status.at - Date.now() / 1000;
    if (lost) found();
    draw(status, clock());
    document.body.dataset.event = newest;
    if (before && before.state !== status.state) announce("Now: " + (STATES[status.state] || ["", status.state])[1]);
  });
  source.addEventListener("alive", () => {
    heard = Date.now();
    if (lost) found();
  });
  source.onerror = () => lose();
}

function lose() {
  if (!lost) {
    lost = true;
    document.body.classList.add("stale");
    gap();
    const since = status ? "Data as of " + new Date(status.at * 1000).toLocaleTimeString() + "." : "Nothing was received yet.";
    put($("lost"), "Connection lost. " + since + " Trying again…");
    $("lost").hidden = false;
    document.title = "Connection lost · Draftmill";
  }
}

function found() {
  lost = false;
  document.body.classList.remove("stale");
  $("lost").hidden = true;
  put($("lost"), "");
  announce("Connected again.");
}

// A browser gives up where it is refused, and does not notice a line that is cut in silence.
setInterval(() => {
  const silent = Date.now() - heard > SILENCE;
  if (source.readyState === EventSource.CLOSED || silent) {
    if (silent) lose();
    source.close();
    open();
  }
}, AGAIN);

setInterval(() => {
  if (status && !lost) drawService(status, clock());
}, 1000);

// === orders ===

async function give(order, button) {
  const token = sessionStorage.getItem("token");
  button.setAttribute("aria-disabled", "true");
  tell("", button.textContent + "…");
  try {
    const answer = await fetch("/" + order, { method: "POST", headers: token ? { Authorization: "Bearer " + token } : {} });
    const sentence = (await answer.text()).trim();
    if (answer.status === 401) {
      sessionStorage.removeItem("token");
      tell("", "");
      ask(order, button, token !== null);
    } else if (answer.status === 200) {
      tell("fine", sentence);
    } else if (answer.status === 202) {
      tell("", sentence);
    } else {
      tell("error", "Refused: " + sentence);
    }
  } catch {
    tell("error", "The order did not reach the server.");
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

let fading = 0;

// What was done is old after a while; what was refused stays until the next order.
function tell(kind, text) {
  clearTimeout(fading);
  if (kind === "fine") fading = setTimeout(() => tell("", ""), READ);
  $("told").className = "told " + kind;
  put($("told"), text);
}

function ask(order, button, wrong) {
  const dialog = $("ask");
  put($("ask-why"), wrong ? "This token is not the one of admin.token_file." : "It is in the file that admin.token_file names.");
  $("token").value = "";
  dialog.returnValue = "leave";
  dialog.onclose = () => {
    const token = $("token").value.trim();
    $("token").value = "";
    button.focus();
    if (dialog.returnValue === "give" && token) {
      sessionStorage.setItem("token", token);
      give(order, button);
    }
  };
  dialog.showModal();
}

for (const button of document.querySelectorAll("[data-order]")) {
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-disabled") !== "true") give(button.dataset.order, button);
  });
}

for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    if (status) drawService(status, clock());
  });
}

open();
