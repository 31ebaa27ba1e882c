// Numbers and names for people.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);
export const tokens = (number) => `${count(number)} ${number === 1 ? "token" : "tokens"}`;
export const percent = (part, all) => (all ? `${(Math.floor((1000 * part) / all) / 10).toFixed(1)} %` : "–");

export function bytes(number) {
  for (const [unit, factor] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (number >= factor) return `${(number / factor).toFixed(number >= 100 * factor ? 0 : 1)} ${unit}`;
  }
  return `${whole.format(number)} B`;
}

export function seconds(number) {
  if (number === null || number === undefined) return "–";
  if (number < 0.0995) return `${(1000 * number).toFixed(number < 0.00995 ? 1 : 0)} ms`;
  return `${number.toFixed(number < 10 ? 2 : 1)} s`;
}

export const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString("en-GB");

/** Text as it is set on the page: lines stay lines; what is obeyed instead of shown (control and direction characters) is a box. */
export const plain = (text) => String(text).replaceAll("\r\n", "\n").replace(/(?![\n\t\u200c\u200d])[\p{C}\u2028\u2029]/gu, "\u25a1");

/** A name in one line: what is no letter, digit, mark or sign (control and direction characters) shows as a box. */
export function clean(text, most = 80) {
  const shown = String(text).slice(0, 4 * most).replace(/[\p{C}\u2028\u2029]/gu, "\u25a1");
  const letters = [...shown];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : shown;
}

export const short = (kv_id) => kv_id.slice(0, 10);

const labels = new Map();
/** Keep a label that a checkpoint tells, for handles of which no request is known. */
export const remember = (kv_id, label) => { if (label && !labels.has(kv_id)) labels.set(kv_id, label); };
export const labelOf = (one) => one.label || labels.get(one.kv_id) || "";
export const named = (one) => clean(labelOf(one) || one.operator || "handle", 48);
