// What the page knows of one run: names, steps, and the columns that were asked for; kept up to date while the run trains.
import { get, getColumns, listen } from "./api.js";

// [metric that is added up, what the axis shows], as the server tells with the facts of runs.
export const axesOf = (runs) => [["", "step"], ...(runs.find((run) => run.facts)?.facts.axes ?? [])];

export class RunData {
  // Listens to what is new until the signal `over`; without one, whoever made it says so, by `on`.
  constructor(number, changed, over) {
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
    this.told = {}; // state, by the stream, since the facts were asked for
    this.waiting = Promise.resolve();
    this.ready = this.loadFacts().then(() => { if (over && this.facts) listen(this, over); });
  }

  // What the page has: the last step of the columns, of which file of metrics, and how many events.
  position() {
    return { since: this.steps.at(-1) ?? -1, generation: this.facts.generation, events: (this.facts.events.at(-1)?.number ?? -1) + 1 };
  }

  // What the stream tells while the server answers may be newer than the answer, and is told once: so it stays.
  async loadFacts() {
    const first = this.facts ? this.position().events : 0;
    this.told = {};
    try {
      const facts = await get(`runs/${this.number}`);
      const last = facts.events.at(-1)?.number ?? -1;
      const later = (this.facts?.events ?? []).filter((event) => event.number >= Math.max(first, last + 1));
      this.facts = { ...facts, ...this.told, events: [...facts.events, ...later] };
      this.error = null;
    } catch (error) {
      this.error = error.message;
    }
    this.changed();
  }

  // Loads columns by name, one request after the other; names that the run does not have are left out.
  want(names) {
    names.forEach((name) => this.wanted.add(name));
    this.enqueue(() => this.loadWanted());
  }

  // What the recorded steps say about critic and lengths, as columns over them; later steps are added.
  wantRecorded() {
    this.wantsRecorded = true;
    this.enqueue(() => this.recorded ?? this.loadRecorded());
  }

  async loadRecorded() {
    const since = this.recorded?.steps.at(-1);
    const more = await get(`runs/${this.number}/recorded?since=${since ?? ""}`);
    const added = ([name, values]) => [name, [...(this.recorded?.[name] ?? []), ...values]];
    this.recorded = Object.fromEntries(Object.entries(more).map(added));
  }

  enqueue(work) {
    this.waiting = this.waiting.then(work).catch((error) => { this.error = error.message; }).then(() => this.changed());
  }

  loadWanted() {
    return this.loadColumns([...this.wanted].filter((name) => !this.columns.has(name)), -1);
  }

  // Loads all steps of new columns, or, of all that are there, those after the last one.
  async loadColumns(names, since) {
    const places = new Map(this.facts.metrics.map(([name], place) => [name, place]));
    const known = names.filter((name) => places.has(name));
    if (!known.length) return;
    const { steps, columns } = await getColumns(this.number, known.map((name) => places.get(name)), since);
    if (since >= 0 || !this.columns.size) this.steps = [...this.steps, ...steps];
    // A step that came meanwhile is told by an event, for all columns at once.
    const length = this.steps.length;
    known.forEach((name, place) => this.columns.set(name, [...(this.columns.get(name) ?? []), ...columns[place]].slice(0, length)));
  }

  on(name, value) {
    if (name === "state") {
      this.told = value;
      this.facts = { ...this.facts, ...value };
    }
    const news = value.events?.filter((event) => event.number >= this.position().events);
    if (name === "happened") this.facts = { ...this.facts, events: [...this.facts.events, ...news] };
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
    // After a recovery the files of lost steps go later than their lines.
    if (isReset || this.recorded?.steps.at(-1) > (this.facts.train.at(-1) ?? -1)) this.recorded = null;
    if (isReset || !this.steps.length) {
      this.steps = [];
      this.columns.clear();
    }
    await this.loadColumns([...this.columns.keys()], this.position().since);
    await this.loadWanted();
    if (this.wantsRecorded) await this.loadRecorded();
  }

  tell(isConnected, why) {
    this.lost = isConnected ? null : `The viewer's server does not answer (${why}); what is shown may be old.`;
    this.changed();
  }

  column(name) {
    return this.columns.get(name);
  }

  // The x axis of curves: what a metric has added up until each step; the steps, for one that the run does not have.
  axis(name) {
    let sum = 0;
    return this.column(name)?.map((value) => (sum += Number.isFinite(value) ? value : 0)) ?? this.steps;
  }
}
