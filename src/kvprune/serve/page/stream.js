// Talking to the server: every call has the key in a header; streams are read by fetch, as
// EventSource cannot send headers.

class Refusal extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("The server cannot be reached. Is it still running?");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // no JSON: the status has to do
  }
  return new Refusal(error.message || `The server answered ${answer.status} ${answer.statusText}`.trim(), answer.status, error.param ?? null);
}

// the data of each server-sent event
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        // a line that begins with a colon is a comment that keeps the connection open
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// the chunks of one completion, until [DONE]
async function* chunksOf(path, body, signal) {
  const answer = await call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  for await (const data of eventsOf(answer)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(chunk.error.message, 0, chunk.error.param ?? null);
    yield chunk;
  }
  throw new Refusal("The stream ended before the answer did.");
}
