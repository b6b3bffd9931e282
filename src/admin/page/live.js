// Event stream of statuses, and commands. Times are in milliseconds.

// Silence after which the connection counts as lost; the server sends a heartbeat every 5 s.
const SILENCE = 15000;
const RETRY = 2000;
// Display time of a reply.
const REPLY = 20000;

let status = null;
let newest = null;
// Difference between the server's clock and this one, in seconds.
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
    const since = status ? "Data as of " + new Date(status.at * 1000).toLocaleTimeString() + "." : "No data received yet.";
    put($("lost"), "Connection lost. " + since + " Reconnecting…");
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

// A browser does not retry a refused connection, and does not detect a dead one.
setInterval(() => {
  const silent = Date.now() - heard > SILENCE;
  if (source.readyState === EventSource.CLOSED || silent) {
    if (silent) lose();
    source.close();
    open();
  }
}, RETRY);

setInterval(() => {
  if (status && !lost) drawService(status, clock());
}, 1000);

// === commands ===

async function send(command, button) {
  const token = sessionStorage.getItem("token");
  button.setAttribute("aria-disabled", "true");
  showReply("", button.textContent + "…");
  try {
    const answer = await fetch("/" + command, { method: "POST", headers: token ? { Authorization: "Bearer " + token } : {} });
    const sentence = (await answer.text()).trim();
    if (answer.status === 401) {
      sessionStorage.removeItem("token");
      showReply("", "");
      ask(command, button, token !== null);
    } else if (answer.status === 200) {
      showReply("fine", sentence);
    } else if (answer.status === 202) {
      showReply("", sentence);
    } else {
      showReply("error", "Refused: " + sentence);
    }
  } catch {
    showReply("error", "The command did not reach the server.");
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

let fading = 0;

// Shows a reply. A success disappears after a while; a refusal stays until the next command.
function showReply(kind, text) {
  clearTimeout(fading);
  if (kind === "fine") fading = setTimeout(() => showReply("", ""), REPLY);
  $("reply").className = "reply " + kind;
  put($("reply"), text);
}

function ask(command, button, wrong) {
  const dialog = $("ask");
  put($("ask-why"), wrong ? "This token differs from admin.token_file." : "The token is in the file that admin.token_file names.");
  $("token").value = "";
  dialog.returnValue = "cancel";
  dialog.onclose = () => {
    const token = $("token").value.trim();
    $("token").value = "";
    button.focus();
    if (dialog.returnValue === "send" && token) {
      sessionStorage.setItem("token", token);
      send(command, button);
    }
  };
  dialog.showModal();
}

for (const button of document.querySelectorAll("[data-command]")) {
  button.addEventListener("click", () => {
    if (button.getAttribute("aria-disabled") !== "true") send(button.dataset.command, button);
  });
}

for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    if (status) drawService(status, clock());
  });
}

open();
