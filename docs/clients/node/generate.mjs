// Streams a completion from a Sharp server: node generate.mjs HOST:PORT PROMPT [MAX_TOKENS]
// SHARP_TOKEN holds a bearer token where the server asks for one; SHARP_CA names a PEM file where it uses TLS.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, prompt, maxTokens = "64"] = process.argv.slice(2);
if (!address || prompt === undefined) {
  console.error("usage: node generate.mjs HOST:PORT PROMPT [MAX_TOKENS]");
  process.exit(2);
}

// The protocol is read from its .proto file, so nothing is generated beforehand.
const proto = process.env.SHARP_PROTO ?? fileURLToPath(new URL("../../../proto", import.meta.url));
const definition = loader.loadSync("sharp/v1/inference.proto", {
  includeDirs: [proto],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).sharp.v1;

const { SHARP_CA: ca, SHARP_TOKEN: token } = process.env;
const credentials = ca ? grpc.credentials.createSsl(readFileSync(ca)) : grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
if (token) metadata.set("authorization", `Bearer ${token}`);

// gRPC calls again by itself: when the server is away, when it is full, after as long as it says, and when it closed
// before it had read the call (CANCELLED).
const retryPolicy = {
  maxAttempts: 5,
  initialBackoff: "0.2s",
  maxBackoff: "10s",
  backoffMultiplier: 2,
  retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
};
const client = new InferenceService(address, credentials, {
  "grpc.service_config": JSON.stringify({ methodConfig: [{ name: [{}], retryPolicy }] }),
});

const call = client.Generate(
  { text: prompt, sampling: { temperature: 0 }, stopping: { max_tokens: Number(maxTokens) } },
  metadata,
);
call.on("data", (response) => {
  if (response.delta) process.stdout.write(response.delta.text);
  if (response.finished) {
    const { reason, usage } = response.finished;
    console.error(`\n${reason}: ${usage.prompt_tokens} tokens read, ${usage.completion_tokens} generated`);
  }
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
