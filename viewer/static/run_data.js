// What the page knows of one run: names, steps, and the columns that were asked for; kept up to date while the run trains.
import { get, getColumns, listen } from "./api.js";

export class RunData {
  // Without `listens`, whoever made it says what is new, by `on`.
  constructor(number, changed, listens = true) {
    this.number = number;
    this.changed = changed;
    this.facts = null;
    this.error = null;
    this.lost = null;
    this.notice = null;
    this.steps = [];
    this.columns = new Map();
    this.wanted = new Set();
    this.recorded = null;
    this.wantsRecorded = false;
    this.waiting = Promise.resolve();
    this.ready = this.loadFacts().then(() => {
      if (listens && this.facts && !this.isClosed) this.stop = listen(number, () => this.position(), (name, value) => this.on(name, value), (ok, why) => this.tell(ok, why));
    });
  }

  close() {
    this.isClosed = true;
    this.stop?.();
  }

  lastEvent() {
    return this.facts.events.at(-1)?.number ?? -1;
  }

  position() {
    return { since: this.steps.length ? this.steps[this.steps.length - 1] : -1, generation: this.facts.generation, events: this.lastEvent() + 1 };
  }

  async loadFacts() {
    try {
      this.facts = await get(`runs/${this.number}`);
      this.error = null;
    } catch (error) {
      this.error = error.message;
    }
    this.changed();
  }

  // Loads columns by name, one request after the other; names that the run does not have are left out.
  want(names) {
    names.forEach((name) => this.wanted.add(name));
    return this.enqueue(() => this.fill(names.filter((name) => !this.columns.has(name))));
  }

  // What the recorded steps say about critic and lengths, as columns over them; later steps are added.
  wantRecorded() {
    this.wantsRecorded = true;
    return this.enqueue(() => this.recorded ?? this.loadRecorded());
  }

  async loadRecorded() {
    const since = this.recorded?.steps.at(-1);
    const more = await get(`runs/${this.number}/recorded?since=${since ?? ""}`);
    this.recorded = this.recorded ? Object.fromEntries(Object.entries(more).map(([name, values]) => [name, [...this.recorded[name], ...values]])) : more;
  }

  enqueue(work) {
    this.waiting = this.waiting.then(work).catch((error) => { this.error = error.message; }).then(() => this.changed());
    return this.waiting;
  }

  async fill(names) {
    const known = this.known(names);
    if (!known.length) return;
    const { steps, columns } = await getColumns(this.number, known.map(([, place]) => place), -1);
    const length = this.steps.length && this.columns.size ? this.steps.length : steps.length;
    if (!this.columns.size) this.steps = Array.from(steps);
    // A step that came meanwhile is told by an event, for all columns at once.
    known.forEach(([name], place) => this.columns.set(name, Array.from(columns[place].subarray(0, length))));
  }

  known(names) {
    const numbers = new Map(this.facts.metrics.map(([name], place) => [name, place]));
    return names.filter((name) => numbers.has(name)).map((name) => [name, numbers.get(name)]);
  }

  async append() {
    const known = this.known([...this.columns.keys()]);
    const { since } = this.position();
    const { steps, columns } = await getColumns(this.number, known.map(([, place]) => place), since);
    this.steps.push(...steps);
    known.forEach(([name], place) => this.columns.get(name).push(...columns[place]));
  }

  on(name, value) {
    if (name === "state") this.facts = { ...this.facts, ...value };
    if (name === "happened") this.facts = { ...this.facts, events: [...this.facts.events, ...value.events.filter((event) => event.number > this.lastEvent())] };
    if (name === "steps" && value.last > this.wentBackTo) this.notice = null;
    if (name === "reset") {
      this.wentBackTo = value.step;
      this.notice = value.step < 0 ? null : `The run went back to step ${value.step}.`;
    }
    if (name === "reset" || name === "steps") this.enqueue(() => this.follow(name === "reset"));
    else this.changed();
  }

  async follow(isReset) {
    await this.loadFacts();
    if (isReset) {
      this.steps = [];
      this.columns.clear();
      this.recorded = null;
    }
    // After a recovery the files of lost steps go later than their lines.
    if (this.recorded?.steps.at(-1) > (this.facts.train.at(-1) ?? -1)) this.recorded = null;
    if (this.columns.size) await this.append();
    await this.fill([...this.wanted].filter((name) => !this.columns.has(name)));
    if (this.wantsRecorded) await this.loadRecorded();
  }

  tell(isConnected, why) {
    this.lost = isConnected ? null : `The viewer's server does not answer (${why}); what is shown may be old.`;
    this.changed();
  }

  column(name) {
    return this.columns.get(name);
  }

  // The x axis of curves: steps, or what has added up until each of them.
  axis(kind) {
    const source = { tokens: "perf/total_num_tokens", time: "perf/time_per_step" }[kind];
    const values = source && this.column(source);
    if (!values) return this.steps;
    let sum = 0;
    return values.map((value) => (sum += Number.isFinite(value) ? value : 0));
  }
}
