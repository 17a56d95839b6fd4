// Bundles what the console takes from npm, one file per entry in bundles/, and the notice of licences.
// The same lock file gives the same bytes: the versions are exact, and nothing of the machine goes in.
import { copyFile, mkdir, readFile, readdir, writeFile } from "node:fs/promises";
import path from "node:path";
import { build } from "esbuild";

const here = import.meta.dirname;
const target = path.resolve(process.argv[2] ?? path.join(here, "../src/polybus/edges/http/console/vendor"));
const COPIED = {
  "uplot/dist/uPlot.min.css": "uplot.css",
  "@fontsource-variable/geist/files/geist-latin-wght-normal.woff2": "geist.woff2",
};
const LICENCE_FILES = ["LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "license"];

async function bundle(name) {
  const { metafile } = await build({
    absWorkingDir: here,
    entryPoints: [`bundles/${name}`],
    outfile: path.join(target, name),
    bundle: true,
    format: "esm",
    minify: true,
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    metafile: true,
  });
  return Object.keys(metafile.inputs);
}

// The package that a file belongs to: node_modules/preact/… or node_modules/@codemirror/view/…
function packageOf(file) {
  return file.match(/.*node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1];
}

const about = async (name) => JSON.parse(await readFile(path.join(here, "node_modules", name, "package.json"), "utf8"));

async function licenceOf(folder) {
  for (const name of LICENCE_FILES) {
    const text = await readFile(path.join(folder, name), "utf8").catch(() => "");
    if (text) return text.trim();
  }
  return "";
}

async function notice(packages) {
  const parts = ["The files in this folder are bundled from these packages.\n"];
  for (const name of packages) {
    const { version, license } = await about(name);
    parts.push(`${"-".repeat(80)}\n${name} ${version}, licence ${license}\n\n${await licenceOf(path.join(here, "node_modules", name))}\n`);
  }
  return parts.join("\n");
}

await mkdir(target, { recursive: true });
const files = [];
for (const name of (await readdir(path.join(here, "bundles"))).sort()) files.push(...(await bundle(name)));
for (const [from, to] of Object.entries(COPIED)) {
  await copyFile(path.join(here, "node_modules", from), path.join(target, to));
  files.push(`node_modules/${from}`);
}
// With what they depend on: @dagrejs/dagre has @dagrejs/graphlib in its own file.
const packages = new Set(files.map(packageOf).filter(Boolean));
for (const name of packages) for (const one of Object.keys((await about(name)).dependencies ?? {})) packages.add(one);
await writeFile(path.join(target, "NOTICE.txt"), await notice([...packages].sort()));
