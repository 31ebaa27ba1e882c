// Asks the server. An answer that says what is wrong becomes a Refused, no answer a Gone.

export class Refused extends Error {}
export class Gone extends Error {}

export async function ask(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) if (value !== "" && value !== undefined) query.set(key, value);
  let answer;
  try {
    answer = await fetch(`api/${name}?${query}`, { cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(20000) });
  } catch (error) {
    throw new Gone("The server does not answer", { cause: error });
  }
  let told;
  try {
    told = await answer.json();
  } catch (error) {
    throw new Gone(`The server answered with something else (${answer.status})`, { cause: error });
  }
  if (!answer.ok) throw new Refused(told.error ?? `The server refused it (${answer.status})`);
  return told;
}
