// Speeds, from counts that grow in steps.
const WINDOW_S = 12;
const SILENCE_S = 4; // longer than the engine's longest step
const SPARK_POINTS = 120;

// Between the first and the last change inside the window exactly the tokens counted were made; the time before the
// first change and after the last belongs to steps that are not over.
class Pace {
  constructor() {
    this.changes = [];
  }

  add(count, now) {
    const last = this.changes.at(-1);
    if (!last || count < last.count) this.changes = [{ count, now }];
    else if (count > last.count) this.changes.push({ count, now });
    while (this.changes.length > 2 && this.changes[1].now < now - WINDOW_S) this.changes.shift();
  }

  rate(now) {
    const [first, last] = [this.changes[0], this.changes.at(-1)];
    if (!last || first === last || now - last.now > SILENCE_S) return 0;
    return (last.count - first.count) / Math.max(last.now - first.now, 0.25);
  }
}

class Spark {
  constructor(name) {
    this.line = byId(`spark-${name}`);
    this.area = byId(`spark-${name}-area`);
    this.values = [];
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > SPARK_POINTS) this.values.shift();
    const most = Math.max(...this.values, 1e-9);
    const start = SPARK_POINTS - this.values.length;
    const points = this.values.map((v, i) => `${start + i + 1},${(31 - 28 * (v / most)).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${start + 1},32L${points.join("L")}L${SPARK_POINTS},32Z`);
  }
}
