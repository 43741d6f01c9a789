// Answers words as the built site's search does, by the site's own search worker:
//   node tools/site_search.mjs SITE WORD …
// prints, as JSON, the addresses of the sections found for each word, the best first.

import { readdirSync, readFileSync } from "node:fs";
import vm from "node:vm";

const [site, ...words] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers/`;
const worker = readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));

let answer, handle;
const scope = {
  console,
  addEventListener: (_, listener) => (handle = listener),
  importScripts: () => {},
  postMessage: (message) => answer(message),
};
scope.self = scope;
vm.runInNewContext(readFileSync(folder + worker, "utf8"), scope);

const ask = (type, data) =>
  new Promise((resolve) => {
    answer = resolve;
    handle({ data: { type, data } });
  });

const { config, docs } = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await ask(0, { config, docs, options: {} });
const found = {};
for (const word of words) {
  const { data } = await ask(2, word);
  found[word] = data.items.map((sections) => sections[0].location);
}
console.log(JSON.stringify(found));
