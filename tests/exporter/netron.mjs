// Opens ONNX files with Netron's own parser and prints the parsed models as JSON:
//     node netron.mjs FOLDER_OF_NETRON MODEL...
// Errors that Netron would show a person (`context.error`) and messages on the console are counted as warnings.
import * as fs from "fs";
import * as path from "path";
import { pathToFileURL } from "url";

const [netron, ...models] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(path.join(netron, `${name}.js`)));
const base = await load("base");
const view = await load("view");
const warnings = [];
for (const level of ["warn", "error"]) {
  console[level] = (...words) => warnings.push(words.join(" "));
}

class Files {
  constructor(file) {
    this.folder = path.dirname(file);
    this.identifier = path.basename(file);
    this.stream = this.read(file);
  }
  read(file) {
    return new base.BinaryStream(new Uint8Array(fs.readFileSync(file)));
  }
  get entries() {
    return new Map();
  }
  async fetch(name) {
    return this.read(path.join(this.folder, name));
  }
  async asset(name) {
    return fs.readFileSync(path.join(netron, name), "utf-8");
  }
  async require(name) {
    return load(path.basename(name, ".js"));
  }
  error(error) {
    warnings.push(error.message);
  }
}

const service = new view.ModelFactoryService({
  environment: () => undefined,
  event: () => undefined,
  require: (name) => load(path.basename(name, ".js")),
});
const found = [];
for (const file of models) {
  const model = await service.open(new Files(file));
  const [graph] = model.modules;
  const unknown = graph.nodes.filter((node) => !node.type || !Array.isArray(node.type.inputs));
  found.push({
    format: model.format,
    nodes: graph.nodes.length,
    functions: (model.functions || []).map((one) => one.name),
    unknown: [...new Set(unknown.map((node) => node.type.name))],
    warnings: warnings.splice(0),
  });
}
process.stdout.write(JSON.stringify(found));
