// Starts the console.
import { html, render } from "./vendor/preact.js";
import { noteFailures } from "./components.js";
import { start } from "./live.js";
import { listen } from "./keys.js";
import { Shell } from "./shell.js";
import { applyTheme } from "./store.js";

applyTheme();
noteFailures();
start();
listen();
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Shell} />`, root);
