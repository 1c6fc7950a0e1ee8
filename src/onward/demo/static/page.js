"use strict";
// The page: one snapshot comes in, everything is drawn from it. No state of its own but what moves on the canvas.

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const ROWS = 11;
let run = null;

// -- the stream ------------------------------------------------------------------------------------------------

function connect() {
  const source = new EventSource("/events");
  source.onmessage = (message) => {
    const now = JSON.parse(message.data);
    if (run !== null && run !== now.run) return location.reload(); // the demo was started anew
    run = now.run;
    link(true);
    show(now);
  };
  source.onerror = () => {
    link(false);
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 1000); // refused: the browser gave up, we do not
  };
}

function link(up) {
  $("link").textContent = up ? "live" : "reconnecting";
  $("link").classList.toggle("live", up);
  document.body.classList.toggle("stale", !up);
}

// -- the numbers -------------------------------------------------------------------------------------------------

function show(now) {
  showBalance(now.balance);
  $("burst").textContent = number.format(now.burst);
  $("attempts").textContent = now.attempts;
  text($("rate-published"), number.format(Math.round(now.rate.published)));
  showLanes(now);
  showWorkers(now.workers);
  showEvents(now.handled);
  showLetters(now.dead);
  showRates(now);
  showLog(now.log);
  flow.take(now);
}

function showBalance(balance) {
  for (const [name, value] of Object.entries(balance)) text($(name), number.format(value));
  for (const name of ["lost", "inverted"]) $(`${name}-box`).classList.toggle("broken", balance[name] > 0);
  const broken = balance.lost + balance.inverted > 0;
  $("balance").classList.toggle("alarmed", broken);
  $("alarm").hidden = !broken;
  document.title = `Onward demo: ${balance.lost} lost, ${balance.inverted} inverted`;
}

function showLanes({ lanes, workers }) {
  const full = Math.max(60, ...lanes.map((lane) => lane.open));
  lanes.forEach((lane, i) => {
    const row = child($("lanes"), i, laneRow);
    const alive = lane.worker !== null && workers[lane.worker - 1].alive;
    row.classList.toggle("orphan", lane.worker !== null && !alive);
    row.style.setProperty("--owner", lane.worker === null ? "var(--muted)" : colour(lane.worker));
    row.querySelector(".fill").style.width = `${(lane.open / full) * 100}%`;
    text(row.querySelector(".open"), number.format(lane.open));
    text(row.querySelector(".owner i"), lane.worker ?? "–");
  });
}

function laneRow(i) {
  return element(`<li><span class="fill"></span><b>${i}</b><span class="open"></span><span class="owner"><span class="word">worker </span><i></i></span></li>`);
}

function showWorkers(workers) {
  $("workers").classList.toggle("many", workers.length > 5);
  workers.forEach((worker, i) => {
    const card = child($("workers"), i, workerCard);
    const state = !worker.alive ? `killed, replaced in ${Math.ceil(worker.replaced_in_s)} s` : worker.started ? "at work" : "starting";
    card.classList.toggle("dead", !worker.alive);
    card.classList.toggle("idle", worker.alive && !worker.started);
    text(card.querySelector(".state"), state);
    text(card.querySelector(".pid"), worker.pid);
    text(card.querySelector(".rate"), number.format(Math.round(worker.rate)));
    text(card.querySelector(".total"), number.format(worker.handled));
    card.querySelector("button").disabled = !worker.alive;
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

function showEvents(handled) {
  const newest = handled.slice(-ROWS).reverse();
  for (let i = 0; i < ROWS; i++) {
    const row = child($("events"), i, () => element(`<tr><td class="key"></td><td></td><td></td><td></td></tr>`));
    const event = newest[i];
    row.hidden = !event;
    if (!event || row.dataset.seq === String(event[0])) continue;
    const [seq, customer, n, worker, , waited, attempt, first] = event;
    row.dataset.seq = seq;
    const [key, count, by, after] = row.children;
    key.textContent = customer;
    key.style.setProperty("--key", hue(customer));
    count.textContent = n;
    by.textContent = `worker ${worker}`;
    by.style.color = colour(worker);
    after.textContent = duration(waited);
    if (attempt > 1) key.append(element(`<span class="badge">try ${attempt}</span>`));
    if (!first) key.append(element(`<span class="badge">again</span>`));
  }
}

function showLetters(letters) {
  const body = $("dead-letters");
  body.parentElement.hidden = !letters.length;
  body.parentElement.nextElementSibling.hidden = letters.length > 0;
  while (body.children.length > letters.length) body.lastChild.remove();
  letters.forEach((letter, i) => {
    const row = child(body, i, letterRow);
    if (row.dataset.number === String(letter.number)) return;
    row.dataset.number = letter.number;
    const [order, customer, why, died, act] = row.children;
    order.textContent = letter.number;
    customer.textContent = letter.customer;
    customer.style.setProperty("--key", hue(letter.customer));
    why.textContent = `${letter.error}, ${letter.attempts} tries`;
    died.textContent = new Date(letter.died * 1000).toLocaleTimeString("en-GB");
    const button = act.firstElementChild;
    button.disabled = false;
    button.setAttribute("aria-label", `Replay order ${letter.number}`);
  });
}

function letterRow() {
  const row = element(`<tr><td></td><td class="key"></td><td class="why"></td><td></td><td><button type="button">Replay</button></td></tr>`);
  row.querySelector("button").addEventListener("click", (event) => {
    event.currentTarget.disabled = true;
    post(`replay?order=${row.dataset.number}`);
  });
  return row;
}

function showRates({ history, rate, handled }) {
  const peak = Math.max(10, ...history.map((point) => point[1]));
  const x = (i) => 400 - (history.length - 1 - i) * (400 / 89);
  const y = (value) => 118 - (value / peak) * 96; // a burst is published faster than the chart is high
  const line = (which) => history.map((point, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(point[which]).toFixed(1)}`).join("");
  $("spark-handled").setAttribute("d", line(1));
  $("spark-published").setAttribute("d", line(0));
  $("spark-area").setAttribute("d", history.length ? `${line(1)}L400 118L${x(0)} 118Z` : "");
  text($("now-handled"), number.format(Math.round(rate.handled)));
  text($("now-published"), number.format(Math.round(rate.published)));
  text($("peak"), number.format(Math.round(peak)));
  const waits = handled.map((event) => event[5]).sort((a, b) => a - b);
  text($("wait"), waits.length ? duration(waits[waits.length >> 1]) : "–");
}

let lastLine = 0;
function showLog(lines) {
  for (const [id, seconds, kind, words] of lines) {
    if (id <= lastLine) continue;
    lastLine = id;
    const row = element(`<li><time></time><span class="${kind}"></span></li>`);
    row.firstChild.textContent = new Date(seconds * 1000).toLocaleTimeString("en-GB");
    row.lastChild.textContent = words;
    $("log").prepend(row);
  }
  while ($("log").children.length > 60) $("log").lastChild.remove();
}

// -- the buttons -------------------------------------------------------------------------------------------------

async function post(what) {
  let answer = "";
  try {
    const response = await fetch(`/${what}`, { method: "POST" });
    if (!response.ok) answer = await response.text();
  } catch {
    answer = "The demo does not answer. Is it still running?";
  }
  $("answer").textContent = answer;
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
    this.lanes = [];
    this.drawing = false;
    new ResizeObserver(() => this.measure()).observe($("path"));
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"]) {
      matchMedia(query).addEventListener("change", () => this.measure());
    }
  }

  take({ placed, handled, lanes, workers }) {
    const fresh = handled.filter((event) => event[0] > this.lastSeq);
    const joined = this.lastSeq === 0;
    this.lastSeq = fresh.length ? fresh.at(-1)[0] : this.lastSeq;
    this.lanes = lanes.map(({ worker }) => ({ worker, alive: worker !== null && workers[worker - 1].alive }));
    if (this.workers !== workers.length) this.measure(workers.length);
    if (!still.matches && !document.hidden && !joined) {
      for (const [, lane, customer] of placed.slice(-20)) this.launch(customer, [["shop", 0], ["laneIn", lane]]);
      for (const [, customer, , worker, lane] of fresh) this.launch(customer, [["laneOut", lane], ["workerIn", worker - 1], ["workerOut", worker - 1], ["end", worker - 1]]);
    }
    this.redraw();
  }

  launch(customer, stops) {
    if (this.dots.length < 400) this.dots.push({ colour: hue(customer), stops, start: performance.now() + Math.random() * 200 });
  }

  measure(workers = this.workers) {
    this.workers = workers;
    const box = this.canvas.getBoundingClientRect();
    const scale = devicePixelRatio || 1;
    this.canvas.width = box.width * scale;
    this.canvas.height = box.height * scale;
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    const edge = (node, side) => {
      const r = node.getBoundingClientRect();
      return [(side ? r.right + 3 : r.left - 3) - box.left, r.top + r.height / 2 - box.top];
    };
    const stacked = innerWidth <= 760, beside = innerWidth > 1180; // as in the style sheet
    const cards = [...$("workers").children], rows = [...$("lanes").children];
    this.at = {
      shop: stacked ? [] : [edge($("shop-node"), 1)],
      laneIn: rows.map((row) => edge(row, 0)), laneOut: rows.map((row) => edge(row, 1)),
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
    const box = this.canvas;
    this.pen.clearRect(0, 0, box.width, box.height);
    this.drawPaths();
    this.dots = this.dots.filter((dot) => this.drawDot(dot, now));
  }

  drawPaths() {
    const { shop, laneIn, laneOut, workerIn, workerOut, end } = this.at;
    const line = this.palette("--line");
    for (const point of laneIn) this.curve(shop[0], point, line, 1.5);
    this.lanes.forEach(({ worker, alive }, i) => {
      if (worker === null) return;
      const style = this.palette(alive ? ownerName(worker) : "--bad");
      this.curve(laneOut[i], workerIn[worker - 1], style, alive ? 1.5 : 1, alive ? [] : [4, 5], 0.55);
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
    this.pen.arc(x, y, 4, 0, 7);
    this.pen.fill();
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
const duration = (ms) => (ms < 1000 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`);

function text(node, value) {
  const words = String(value);
  if (node && node.textContent !== words) node.textContent = words;
}
function child(parent, i, make) {
  while (parent.children.length <= i) parent.append(make(parent.children.length));
  return parent.children[i];
}
function element(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

const flow = new Flow($("flow"));
connect();
