"use strict";
// The page draws everything from the newest snapshot. Its own state is only what moves on the canvas, which dead letters
// are open, and whether the demo still answers.

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const ROWS = 11;

// -- the stream ------------------------------------------------------------------------------------------------

const RETRY_MS = 1000;
const MOST_MISSES = 3; // connections that fail one after the other: then the demo has ended
let run = null;
let latest = null; // snapshot
let misses = 0;
let state = "connecting"; // then live, reconnecting, ending, ended

function connect() {
  const source = new EventSource("/events");
  source.onmessage = (message) => {
    const now = JSON.parse(message.data);
    if (run !== null && run !== now.run) return location.reload(); // a new demo on the same port
    run = now.run;
    misses = 0;
    setState(now.state, "All workers have stopped. The numbers below are the final ones.");
    show(now);
  };
  source.onerror = () => {
    source.close();
    misses += 1;
    if (state !== "ended" && misses < MOST_MISSES) setState("reconnecting");
    else if (state !== "ended") setState("ended", "Its process does not answer any more. The numbers below are the last ones it sent.");
    setTimeout(connect, RETRY_MS);
  };
}

function setState(next, why = "") {
  if (state === next) return;
  state = next;
  const ended = state === "ended";
  text($("link"), { ended: "ended", ending: "ending: the workers stop" }[state] ?? state);
  $("link").classList.toggle("live", state === "live");
  document.body.classList.toggle("ended", ended);
  $("ended").hidden = !ended;
  if (ended) {
    text($("ended-why"), why);
    if (latest) show(latest); // a demo that was killed sends no final snapshot
  }
  for (const button of document.querySelectorAll("main button")) button.disabled = state === "ending" || ended;
}

// -- the numbers -------------------------------------------------------------------------------------------------

function show(snapshot) {
  latest = snapshot;
  const now = state === "ended" ? stopped(snapshot) : snapshot;
  showBalance(now.balance);
  $("burst").textContent = number.format(now.burst);
  $("attempts").textContent = now.attempts;
  text($("rate-published"), number.format(Math.round(now.rate.published)));
  if (now.broker !== "SQLite") text($("broker"), now.broker);
  showPartitions(now);
  showWorkers(now.workers);
  showWaiting(now);
  showEvents(now);
  showLetters(now);
  showRates(now);
  showLog(now.log);
  flow.take(now);
}

/** The snapshot with all rates 0: the final one still has the rates of the last second. */
function stopped(now) {
  return { ...now, rate: { published: 0, handled: 0 }, workers: now.workers.map((worker) => ({ ...worker, rate: 0 })) };
}

function showBalance(balance) {
  for (const [name, value] of Object.entries(balance)) text($(name), number.format(value));
  for (const name of ["lost", "inverted"]) $(`${name}-box`).classList.toggle("broken", balance[name] > 0);
  const broken = balance.lost + balance.inverted > 0;
  $("balance").classList.toggle("alarmed", broken);
  $("alarm").hidden = !broken;
  document.title = `Onward demo${state === "ended" ? " (ended)" : ""}: ${balance.lost} lost, ${balance.inverted} inverted`;
}

function showPartitions({ partitions, workers, waiting }) {
  const full = Math.max(60, ...partitions.map((partition) => partition.open));
  const holding = new Map(waiting.filter((each) => each.state === "waiting").map((each) => [each.partition, each]));
  partitions.forEach((partition, i) => {
    const row = child($("partitions"), i, partitionRow);
    const alive = partition.worker !== null && workers[partition.worker - 1].alive;
    row.classList.toggle("orphan", partition.worker !== null && !alive && state !== "ended");
    row.style.setProperty("--owner", partition.worker === null ? "var(--muted)" : colour(partition.worker));
    row.querySelector(".fill").style.width = `${(partition.open / full) * 100}%`;
    text(row.querySelector(".open"), number.format(partition.open));
    text(row.querySelector(".owner i"), partition.worker ?? "–");
    const mark = row.querySelector(".waits");
    mark.hidden = !holding.has(i);
    if (mark.hidden) return;
    text(mark, `${holding.get(i).customer} waits`);
    mark.style.setProperty("--key", hue(holding.get(i).customer));
  });
}

function partitionRow(i) {
  return element(`<li><span class="fill"></span><b>${i}</b><span class="waits key" hidden></span><span class="open"></span><span class="owner"><span class="word">worker </span><i></i></span></li>`);
}

function showWorkers(workers) {
  $("workers").classList.toggle("many", workers.length > 5);
  workers.forEach((worker, i) => {
    const card = child($("workers"), i, workerCard);
    const back = `killed, back in ${Math.ceil(worker.replaced_in_s)} s`;
    const doing = state === "ended" ? "stopped" : !worker.alive ? back : worker.started ? "at work" : "starting";
    card.classList.toggle("dead", !worker.alive && state !== "ended");
    card.classList.toggle("idle", doing === "starting" || doing === "stopped");
    text(card.querySelector(".state"), doing);
    text(card.querySelector(".pid"), worker.pid);
    text(card.querySelector(".rate"), number.format(Math.round(worker.rate)));
    text(card.querySelector(".total"), number.format(worker.handled));
    card.querySelector("button").disabled = !worker.alive || state !== "live";
  });
}

function workerCard(i) {
  const card = element(`<li><span class="name">Worker ${i + 1}<span class="state"></span></span>
    <button type="button" aria-label="Kill worker ${i + 1}">Kill</button>
    <span class="facts">pid <span class="pid"></span> · <b class="rate"></b>/s · <b class="total"></b> handled</span></li>`);
  card.style.setProperty("--owner", colour(i + 1));
  card.querySelector("button").addEventListener("click", () => post(`kill?worker=${i + 1}`));
  return card;
}

// -- the poisoned customer ---------------------------------------------------------------------------------------

function showWaiting({ waiting, attempts }) {
  $("waiting").classList.toggle("active", waiting.length > 0);
  $("waiting").querySelector(".none").hidden = waiting.length > 0;
  keyed($("customers"), waiting, (each) => each.number, () => customerRow(attempts), (row, each) => {
    row.className = each.state;
    row.style.setProperty("--key", hue(each.customer));
    text(row.querySelector(".key"), each.customer);
    text(row.querySelector(".story"), story(each, attempts));
    [...row.querySelector(".attempts").children].forEach((mark, i) => {
      mark.className = i < each.failed ? "failed" : each.state === "waiting" && state !== "ended" && i === each.failed ? "next" : "";
    });
    const left = each.wait_s && each.state === "waiting" && state !== "ended" ? each.next_in_s / each.wait_s : 0;
    row.querySelector(".countdown").style.width = `${left * 100}%`;
    text(row.querySelector(".held"), held(each));
    showOrders(row.querySelector(".orders"), each);
  });
}

function showOrders(list, { orders, held: count, ran }) {
  const more = count + ran - orders.length; // the snapshot has only the first ones
  const chips = orders.map(([n, done]) => [n, done, `no. ${n}: ${done ? "handled" : "held"}`]);
  if (more > 0) chips.push([`+${number.format(more)}`, count === 0, `${number.format(more)} more`]);
  chips.forEach(([words, done, label], i) => {
    const chip = child(list, i, () => element(`<li></li>`));
    text(chip, words);
    chip.classList.toggle("ran", done);
    chip.setAttribute("aria-label", label);
  });
}

function customerRow(attempts) {
  return element(`<li><span class="key"></span><span class="attempts" aria-hidden="true">${"<i></i>".repeat(attempts)}</span>
    <span class="story"></span><span class="behind"><span class="held"></span><ol class="orders"></ol></span><span class="countdown"></span></li>`);
}

function story({ state: now, handled, failed, next_in_s: next, number: id }, attempts) {
  if (now !== "waiting") return `order ${id} ${handled ? "is handled now" : "is a dead letter now"}`;
  if (state === "ended") return `order ${id}: ${failed} of ${attempts} attempts failed before the demo ended`;
  if (failed === 0) return `order ${id}: attempt 1 of ${attempts}`;
  const then = failed >= attempts ? "giving up" : next > 0 ? `next in ${next.toFixed(1)} s` : "next attempt now";
  return `order ${id}: attempt ${failed} of ${attempts} failed, ${then}`;
}

function held({ state: now, held: count, ran }) {
  const orders = (n) => (n === 1 ? "1 order" : `${n} orders`);
  if (now === "waiting") return count ? `${orders(count)} held` : "";
  return count ? `${orders(count)} still held` : ran ? `${ran === 1 ? "the held order has" : `all ${ran} held orders have`} run` : "";
}

function showEvents({ handled, watched }) {
  const marked = new Set(watched);
  // A highlighted customer's rows stay in view for some seconds; the others make room.
  const theirs = handled.filter((event) => marked.has(event[1])).slice(-6);
  const others = handled.filter((event) => !marked.has(event[1])).slice(theirs.length - ROWS);
  const newest = [...theirs, ...others].sort((a, b) => b[0] - a[0]);
  for (let i = 0; i < ROWS; i++) {
    const row = child($("events"), i, () => element(`<tr><td class="key"></td><td></td><td class="by"></td><td></td></tr>`));
    const event = newest[i];
    row.hidden = !event;
    if (!event) continue;
    row.classList.toggle("watched", marked.has(event[1]));
    if (row.dataset.seq === String(event[0])) continue;
    const [seq, customer, n, worker, , waited, attempt, first] = event;
    row.dataset.seq = seq;
    row.style.setProperty("--key", hue(customer));
    const [key, count, by, after] = row.children;
    key.textContent = customer;
    count.textContent = n;
    by.textContent = worker;
    by.style.setProperty("--owner", colour(worker));
    after.textContent = duration(waited);
    if (attempt > 1) key.append(element(`<span class="badge">attempt ${attempt}</span>`));
    if (!first) key.append(element(`<span class="badge">again</span>`));
  }
}

// -- the dead letters --------------------------------------------------------------------------------------------

function showLetters({ dead, dead_count: count }) {
  const section = $("letters");
  section.querySelector(".none").hidden = dead.length > 0;
  $("replay-all").hidden = dead.length === 0;
  text($("replay-all"), count > 1 ? `Replay all ${number.format(count)}` : "Replay all");
  const older = section.querySelector(".older");
  older.hidden = count <= dead.length;
  text(older, `and ${number.format(count - dead.length)} older ones`);
  keyed($("dead-letters"), dead, (letter) => letter.number, letterRow, () => {});
}

function letterRow(letter) {
  const row = element(`<li><details><summary><span class="order"></span><span class="key"></span><span class="why"></span><time></time></summary><div class="letter"></div></details>
    <button type="button">Replay</button></li>`);
  row.style.setProperty("--key", hue(letter.customer));
  row.querySelector(".order").textContent = `order ${letter.number}`;
  row.querySelector(".key").textContent = letter.customer;
  row.querySelector(".why").textContent = `${letter.error} (${letter.attempts} attempts)`;
  row.querySelector("time").textContent = clock(letter.died * 1000);
  const details = row.querySelector("details");
  details.addEventListener("toggle", () => details.open && openLetter(letter.number, details.querySelector(".letter")));
  const button = row.querySelector("button");
  button.setAttribute("aria-label", `Replay order ${letter.number}`);
  button.addEventListener("click", () => replay(button, `replay?order=${letter.number}`));
  return row;
}

async function openLetter(order, box) {
  if (box.dataset.loaded) return;
  try {
    const response = await fetch(`/letter?order=${order}`);
    if (!response.ok) throw new Error(await response.text());
    fillLetter(box, await response.json());
    box.dataset.loaded = "yes";
  } catch (error) {
    box.textContent = state === "ended" ? "The demo has ended, and its data was deleted." : `Cannot be shown: ${error.message}`;
  }
}

function fillLetter(box, { event, failure, topic, partition, position, id }) {
  const facts = [
    ["attempts", `${failure.attempts}, in ${failure.handler}`],
    ["published", moment(event.time)],
    ["first failure", moment(failure.first)],
    ["last failure", moment(failure.last)],
    ["event", `${event.type ? `${event.type}, ` : ""}id ${event.id}`],
    ["place", `topic ${topic}, partition ${partition}, position ${position}`],
    ["letter", id],
  ];
  const headers = Object.entries(event.headers);
  box.replaceChildren(
    part("Error", pre(`${failure.error}: ${failure.message}`, "error")),
    part("What happened", list(facts)),
    part("Payload", pre(JSON.stringify(event.value, null, 2))),
    part("Headers", headers.length ? list(headers) : paragraph("none")),
    part("Traceback", pre(failure.traceback.trimEnd(), "traceback")),
  );
}

function part(title, content) {
  const node = element(`<section><h3></h3></section>`);
  node.className = title.toLowerCase().replaceAll(" ", "-");
  node.firstChild.textContent = title;
  node.append(content);
  return node;
}
function list(pairs) {
  const node = element(`<dl class="facts"></dl>`);
  for (const [name, value] of pairs) {
    const pair = element(`<div><dt></dt><dd></dd></div>`);
    pair.firstChild.textContent = name;
    pair.lastChild.textContent = value;
    node.append(pair);
  }
  return node;
}
function pre(words, kind = "") {
  const node = element(`<pre tabindex="0"></pre>`);
  node.className = kind;
  node.textContent = words;
  return node;
}
function paragraph(words) {
  const node = element(`<p></p>`);
  node.textContent = words;
  return node;
}

async function replay(button, what) {
  button.disabled = true;
  text($("replayed"), await post(what));
  button.disabled = state !== "live";
}
$("replay-all").addEventListener("click", () => replay($("replay-all"), "replay"));

// -- the rates and the log ---------------------------------------------------------------------------------------

function showRates({ history, rate, handled }) {
  const [published, peak] = [0, 1].map((which) => Math.max(0, ...history.map((point) => point[which])));
  const top = Math.max(10, peak);
  const x = (i) => 400 - (history.length - 1 - i) * (400 / 89);
  // A burst is published many times faster than it is handled. Its line stays at the upper edge; the legend has its peak.
  const y = (value) => Math.max(4, 118 - (value / top) * 96);
  const line = (which) => history.map((point, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(point[which]).toFixed(1)}`).join("");
  $("spark-handled").setAttribute("d", line(1));
  $("spark-published").setAttribute("d", line(0));
  $("spark-area").setAttribute("d", history.length ? `${line(1)}L400 118L${x(0)} 118Z` : "");
  text($("now-handled"), number.format(Math.round(rate.handled)));
  text($("now-published"), number.format(Math.round(rate.published)));
  text($("peak-handled"), number.format(Math.round(peak)));
  text($("peak-published"), number.format(Math.round(published)));
  const waits = handled.map((event) => event[5]).sort((a, b) => a - b);
  text($("wait"), waits.length ? duration(waits[waits.length >> 1]) : "–");
}

let lastLine = 0;
function showLog(lines) {
  for (const [id, seconds, kind, words] of lines) {
    if (id <= lastLine) continue;
    lastLine = id;
    const row = element(`<li><time></time><span class="${kind}"></span></li>`);
    row.firstChild.textContent = clock(seconds * 1000);
    row.lastChild.textContent = words;
    $("log").prepend(row);
  }
  while ($("log").children.length > 60) $("log").lastChild.remove();
}

// -- the buttons -------------------------------------------------------------------------------------------------

/** Returns what the demo answered. A refusal is also shown below the buttons. */
async function post(what) {
  let answer = "The demo does not answer.";
  let fine = false;
  try {
    const response = await fetch(`/${what}`, { method: "POST" });
    fine = response.ok;
    answer = await response.text();
  } catch {} // the stream notices it too
  text($("answer"), fine ? "" : answer);
  return answer;
}
for (const button of document.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => post(button.dataset.action));
}

// -- what moves: each dot is an order, its colour the customer's; in a burst only some are drawn -------------------

class Flow {
  constructor(canvas) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.dots = [];
    this.lastPlaced = this.lastSeq = 0;
    this.owners = [];
    this.watched = new Set();
    this.drawing = false;
    new ResizeObserver(() => this.measure()).observe($("path"));
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"]) {
      matchMedia(query).addEventListener("change", () => this.measure());
    }
  }

  take({ placed, handled, partitions, workers, watched }) {
    const fresh = handled.filter((event) => event[0] > this.lastSeq);
    const joined = this.lastSeq === 0;
    this.lastSeq = fresh.length ? fresh.at(-1)[0] : this.lastSeq;
    this.watched = new Set(watched);
    this.owners = partitions.map(({ worker }) => ({ worker, alive: worker !== null && (workers[worker - 1].alive || state === "ended") }));
    if (this.workers !== workers.length) this.measure(workers.length);
    if (!still.matches && !document.hidden && !joined && state === "live") {
      for (const [, partition, customer] of placed.slice(-20)) this.launch(customer, [["shop", 0], ["partitionIn", partition]]);
      for (const [, customer, , worker, partition] of fresh.slice(-40)) {
        this.launch(customer, [["partitionOut", partition], ["workerIn", worker - 1], ["workerOut", worker - 1], ["end", worker - 1]]);
      }
    }
    this.redraw();
  }

  launch(customer, stops) {
    if (this.dots.length >= 400) return;
    this.dots.push({ colour: hue(customer), watched: this.watched.has(customer), stops, start: performance.now() + Math.random() * 200 });
  }

  measure(workers = this.workers) {
    this.workers = workers;
    const box = this.canvas.getBoundingClientRect();
    const scale = devicePixelRatio || 1;
    [this.width, this.height] = [box.width, box.height];
    this.canvas.width = box.width * scale;
    this.canvas.height = box.height * scale;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    const edge = (node, side) => {
      const r = node.getBoundingClientRect();
      return [(side ? r.right + 3 : r.left - 3) - box.left, r.top + r.height / 2 - box.top];
    };
    const stacked = innerWidth <= 760, beside = innerWidth > 1240; // as in the style sheet
    const cards = [...$("workers").children], rows = [...$("partitions").children];
    this.at = {
      shop: stacked ? [] : [edge($("shop-node"), 1)],
      partitionIn: rows.map((row) => edge(row, 0)), partitionOut: rows.map((row) => edge(row, 1)),
      workerIn: cards.map((card) => edge(card, 0)), workerOut: beside ? cards.map((card) => edge(card, 1)) : [],
      end: beside ? cards.map((card) => [edge($("effects"), 0)[0], edge(card, 1)[1]]) : [],
    };
    const style = getComputedStyle(document.documentElement);
    this.palette = (name) => style.getPropertyValue(name).trim(); // live: follows the colour scheme
    this.keyLight = this.palette("--key-light");
    this.redraw();
  }

  redraw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame((now) => {
      this.drawing = false;
      this.draw(now);
      if (this.dots.length) this.redraw();
    });
  }

  draw(now) {
    if (!this.at) return;
    this.pen.clearRect(0, 0, this.width, this.height);
    this.drawPaths();
    this.dots = this.dots.filter((dot) => this.drawDot(dot, now));
  }

  drawPaths() {
    const { shop, partitionIn, partitionOut, workerIn, workerOut, end } = this.at;
    const line = this.palette("--line");
    for (const point of partitionIn) this.curve(shop[0], point, line, 1.5);
    this.owners.forEach(({ worker, alive }, i) => {
      if (worker === null) return;
      const style = this.palette(alive ? ownerName(worker) : "--bad");
      this.curve(partitionOut[i], workerIn[worker - 1], style, alive ? 1.5 : 1, alive ? [] : [4, 5], 0.55);
    });
    end.forEach((point, i) => this.curve(workerOut[i], point, line, 1.5));
  }

  curve(from, to, style, width, dash = [], alpha = 1) {
    if (!from || !to) return;
    const middle = (from[0] + to[0]) / 2;
    this.pen.globalAlpha = alpha;
    this.pen.strokeStyle = style;
    this.pen.lineWidth = width;
    this.pen.setLineDash(dash);
    this.pen.beginPath();
    this.pen.moveTo(...from);
    this.pen.bezierCurveTo(middle, from[1], middle, to[1], ...to);
    this.pen.stroke();
    this.pen.globalAlpha = 1;
  }

  drawDot(dot, now) {
    const LEG = 450; // ms between two stops
    const age = (now - dot.start) / LEG;
    const leg = Math.floor(age);
    if (age < 0) return true;
    if (leg >= dot.stops.length - 1) return false;
    const [from, to] = [dot.stops[leg], dot.stops[leg + 1]].map(([name, i]) => this.at[name][i]);
    if (!from || !to) return false;
    const t = age - leg, s = 1 - t, middle = (from[0] + to[0]) / 2;
    const x = s * s * s * from[0] + 3 * s * t * middle + t * t * t * to[0];
    const y = (s * s * s + 3 * s * s * t) * from[1] + (3 * s * t * t + t * t * t) * to[1];
    this.pen.fillStyle = dot.colour.replace("var(--key-light)", this.keyLight);
    this.pen.beginPath();
    this.pen.arc(x, y, dot.watched ? 6 : 4, 0, 7);
    this.pen.fill();
    if (dot.watched) {
      this.pen.strokeStyle = this.palette("--text");
      this.pen.lineWidth = 1.5;
      this.pen.setLineDash([]);
      this.pen.stroke();
    }
    return true;
  }
}

// -- small things ------------------------------------------------------------------------------------------------

const hues = new Map();
function hue(customer) {
  if (!hues.has(customer)) {
    let hash = 7;
    for (const letter of customer) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
    hues.set(customer, `hsl(${Math.round((hash * 137.508) % 360)} 65% var(--key-light))`);
  }
  return hues.get(customer);
}
const ownerName = (worker) => `--w${((worker - 1) % 6) + 1}`;
const colour = (worker) => `var(${ownerName(worker)})`;
const clock = (when) => new Date(when).toLocaleTimeString("en-GB");
const moment = (when) => `${clock(when)}.${Math.floor(new Date(when).getMilliseconds() / 100)}`;
const duration = (ms) => (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`);

function text(node, value) {
  const words = String(value);
  if (node && node.textContent !== words) node.textContent = words;
}
function child(parent, i, make) {
  while (parent.children.length <= i) parent.append(make(parent.children.length));
  return parent.children[i];
}
/** Makes the children of `parent` those of `items`, in their order. A child keeps its state while its item is there. */
function keyed(parent, items, key, make, fill) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let focused = false;
  const wanted = new Set(items.map((item) => String(key(item))));
  for (const [name, node] of old) {
    if (wanted.has(name)) continue;
    focused ||= node.contains(document.activeElement);
    node.remove();
  }
  items.forEach((item, i) => {
    const name = String(key(item));
    const node = old.get(name) ?? make(item);
    node.dataset.key = name;
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
    fill(node, item);
  });
  if (focused) parent.closest("[tabindex]")?.focus(); // what had the focus is gone: stay in its section
}
function element(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

const flow = new Flow($("flow"));
connect();
