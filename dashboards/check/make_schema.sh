#!/usr/bin/env bash
# Makes dashboard.schema.json of the types that Grafana publishes (npm package @grafana/schema, Apache-2.0).
# Needs node and npm; takes a minute. Run it to check against a newer Grafana: make_schema.sh [version]
set -euo pipefail
version=${1:-13.2.3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
echo '{"private": true}' > package.json
npm install --ignore-scripts --no-audit --no-fund --loglevel=error "@grafana/schema@$version" ts-json-schema-generator@2
npx ts-json-schema-generator --no-type-check --type Dashboard --out whole.json \
  --path node_modules/@grafana/schema/dist/types/raw/dashboard/x/types.gen.d.ts
node - "$version" "$here/dashboard.schema.json" <<'JS'
const fs = require("fs");
const [version, out] = process.argv.slice(2);
const bare = (node) =>
  Array.isArray(node) ? node.map(bare)
  : node && typeof node === "object" ? Object.fromEntries(Object.entries(node)
      .filter(([key, value]) => key !== "description" || typeof value !== "string").map(([key, value]) => [key, bare(value)]))
  : node;
const schema = bare(JSON.parse(fs.readFileSync("whole.json")));
// What a data source adds to an annotation is its own: its query, and how a value becomes an event.
schema.definitions.AnnotationQuery.additionalProperties = true;
schema.definitions.AnnotationTarget.additionalProperties = true;
const origin = `Generated from @grafana/schema ${version} (Copyright Grafana Labs, Apache-2.0) by make_schema.sh; descriptions are left out.`;
fs.writeFileSync(out, JSON.stringify({ $comment: origin, ...schema }, null, 1) + "\n");
JS
