// A page that uses mage-sdk-js, without the page: prints what it gets, one JSON object a line.
//
//   node client.js ENDPOINT SESSION_KEY TRANSPORT [EVENT_NAME ...]
//
// It prints {"delivery": packs} for what came over the wire, {"event": name, "path": type, "data":
// data} for what the SDK emitted to a listener of that name, and {"error": text}. It takes commands
// on standard input, one a line: `start`, `abort`, and `hold`, which keeps the SDK from confirming.
'use strict';

const WebSocket = require('ws');

// A browser reports a failed connection by `close` alone if nobody listens to `error`; ws throws.
class BrowserSocket extends WebSocket {
  constructor(url) {
    super(url);
    this.on('error', () => {});
  }
}

global.XMLHttpRequest = require('xhr2');
global.window = { WebSocket: BrowserSocket };

const EventManager = require('mage-sdk-js/lib/EventManager');
const MsgServer = require('mage-sdk-js/lib/MsgServer');
const messageStream = require('mage-sdk-js/lib/messageStream');

const say = (what) => process.stdout.write(JSON.stringify(what) + '\n');

// Listen before the SDK does, so that a delivery is told before the events it leads to.
const create = messageStream.create;
messageStream.create = (config) => {
  const stream = create(config);
  stream.on('delivery', (packs) => say({ delivery: packs }));
  stream.on('error', (error) => say({ error: String(error.error || error) }));
  return stream;
};

const [endpoint, sessionKey, transport, ...names] = process.argv.slice(2);
const events = new EventManager();
const server = new MsgServer(events);
const pace = { url: endpoint, afterRequestInterval: 20, afterErrorInterval: 50 };

server.setupMessageStream({ detect: [transport], transports: { [transport]: pace } });
server.setSessionKey(sessionKey);
for (const name of names) {
  events.on(name, (path, data) => say({ event: name, path, data }));
}

const commands = {
  start: () => server.start(),
  abort: () => server.abort(),
  hold: () => { server.stream.confirm = null; },
};

require('readline')
  .createInterface({ input: process.stdin })
  .on('line', (line) => commands[line]())
  .on('close', () => process.exit(0));
