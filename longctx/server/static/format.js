// Numbers as people read them: the same forms as the command line's.
const wholeNumbers = new Intl.NumberFormat("en-US");

function formatCount(value) {
  return wholeNumbers.format(Math.round(value));
}

function formatBytes(bytes) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= 0.9995 * scale) {
      const size = bytes / scale;
      return `${size >= 99.95 ? formatCount(size) : size.toFixed(size >= 9.995 ? 1 : 2)} ${unit}`;
    }
  }
  return `${Math.round(bytes)} B`;
}

function formatSeconds(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1e3)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (seconds < 3599.5) return `${Math.floor(whole / 60)} min ${pad(whole % 60)} s`;
  if (seconds >= 48 * 3600) return `${formatCount(seconds / 86400)} days`;
  const minutes = Math.round(seconds / 60);
  return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
}

// "131,072", "128K" and "1M" as the command line reads them, K being 1,024; null for anything else.
function parseTokens(text) {
  const match = /^(\d+(?:\.\d+)?)([km]?)$/i.exec(text.replace(/[\s,_]/g, ""));
  return match && Math.round(Number(match[1]) * { "": 1, k: 1024, m: 1024 ** 2 }[match[2].toLowerCase()]);
}

// For a time that runs: without the tenths that flicker.
function formatAbout(seconds) {
  return seconds < 59.5 ? `${Math.ceil(seconds)} s` : formatSeconds(seconds);
}

function formatRate(perSecond) {
  return perSecond >= 99.5 || perSecond === 0 ? formatCount(perSecond) : perSecond.toFixed(1);
}

function formatPercent(part, whole) {
  if (!whole) return "0 %";
  const percent = (100 * part) / whole;
  return `${percent > 0 && percent < 1 ? "< 1" : percent > 99 && percent < 100 ? "> 99" : Math.round(percent)} %`;
}

// Progress never says 100 % before the end.
function formatProgress(part, whole) {
  return `${whole ? Math.floor((100 * part) / whole) : 0} %`;
}

function pad(number) {
  return String(number).padStart(2, "0");
}

function shortId(id) {
  return id.slice(0, 8);
}

function formatClock(unixSeconds) {
  const time = new Date(1e3 * unixSeconds);
  return [time.getHours(), time.getMinutes(), time.getSeconds()].map(pad).join(":");
}

// "14,848 from g1, 512 from g2" of a usage's by_tier.
function formatTiers(byTier) {
  const found = Object.entries(byTier ?? {}).filter(([, count]) => count > 0);
  return found.map(([tier, count]) => `${formatCount(count)} from ${tier}`).join(", ");
}
