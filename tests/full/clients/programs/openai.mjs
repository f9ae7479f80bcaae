// openai for Node: chats, streams, tools, the Responses API.
import assert from "node:assert"
import OpenAI from "openai"

const [base, model] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "-", maxRetries: 0 })
const messages = [{ role: "user", content: "a" }]
const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 3 })
assert.equal(chat.choices[0].message.content, "bcd")
let text = ""
for await (const chunk of await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 3, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? ""
assert.equal(text, "bcd")
const tools = [{ type: "function", function: { name: "f", parameters: { type: "object", additionalProperties: false } } }]
const call = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false })
assert.equal(call.choices[0].message.tool_calls[0].function.name, "f")
const response = await client.responses.create({ model, input: "a", temperature: 0, max_output_tokens: 3 })
assert.equal(response.output_text, "bcd")
console.log("chat, stream, tools, responses")
