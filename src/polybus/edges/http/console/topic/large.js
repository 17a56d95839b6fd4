// Send a large payload again: it is stored apart, so it cannot be edited, but it goes again as it is.
import { html, useState } from "../vendor/preact.js";
import { ask, path } from "../api.js";
import { Failure, MessageLink, say } from "../components.js";
import * as format from "../format.js";
import { useAction } from "../hooks.js";

const NDJSON = "application/x-ndjson";

export function Large({ topic, message }) {
  const { reference } = message;
  const [sent, setSent] = useState(null);
  const publish = useAction(async () => {
    const offset = await sendAgain(topic.name, message);
    setSent(offset);
    say(`Published at offset ${format.count(offset)}`);
  });
  return html`<div class="stack">
    <p>Its payload of ${format.bytes(reference.size)} is stored apart and cannot be edited here. It is sent as it is, with its key and headers.</p>
    <${Failure} error=${publish.error} />
    <div class="actions"><button type="button" class="primary" disabled=${publish.running} onClick=${publish.run}>${publish.running ? "Sending" : "Publish it again"}</button>
      ${sent !== null && html`<${MessageLink} topic=${topic.name} offset=${sent}>Show message ${format.count(sent)}<//>`}</div>
  </div>`;
}

async function sendAgain(topic, { reference, key, headers }) {
  const payload = await (await ask("GET", path`/v1/blobs/${reference.id}`)).blob();
  const isBare = key === null && !Object.keys(headers).length;
  const answer = isBare ? await put(topic, payload, reference) : await post(topic, payload, { key, headers });
  return (await answer.json()).offsets[0];
}

const put = (topic, body, { type, sha256 }) => ask("PUT", path`/v1/topics/${topic}/blob`, { query: { sha256 }, body, type });

/** Only a line has a key and headers. */
async function post(topic, payload, { key, headers }) {
  const line = { base64: await base64(payload), headers, ...(key === null ? {} : { key }) };
  return ask("POST", path`/v1/topics/${topic}/messages`, { body: `${JSON.stringify(line)}\n`, type: NDJSON });
}

const base64 = (payload) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(payload);
});
