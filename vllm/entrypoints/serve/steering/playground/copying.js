// A request as text to run elsewhere: with curl, with the one-file client, with `openai`.

// JSON's strings are Python's, too; true, false and null are not.
function python(value, indent = '') {
  if (value === null) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (typeof value !== 'object') return JSON.stringify(value);
  const list = Array.isArray(value), deeper = `${indent}    `;
  const parts = list ? value.map((one) => python(one, deeper))
    : pairs(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one, deeper)}`);
  const [open, close] = list ? '[]' : '{}';
  const flat = open + parts.join(', ') + close;
  if (flat.length + indent.length < 88 && !flat.includes('\n')) return flat;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join('')}${indent}${close}`;
}

function asCurl(origin, { path, body }) {
  return `curl -s ${origin}${path} -H 'Content-Type: application/json' \\\n` +
    '    -H "Authorization: Bearer $VLLM_API_KEY" ' +
    `-d @- <<'JSON'\n${JSON.stringify(body, null, 1)}\nJSON\n`;
}

const KEY = 'os.environ.get("VLLM_API_KEY", "none")';

function asClient(origin, { body }) {
  const { model, prompt, messages, ...fields } = body;
  return 'import os\n\nfrom vllm.entrypoints.serve.steering.client import SteeringClient\n\n' +
    `client = SteeringClient(${python(origin)}, model=${python(model)}, api_key=${KEY})\n` +
    `fields = ${python(fields)}\n` +
    `answer = client.complete(${python(prompt ?? messages)}, **fields)\nprint(answer.text)\n`;
}

const OWN_FIELDS = ['steering_vectors', 'prefill_steering_vectors', 'decode_steering_vectors',
  'steering', 'steering_modules', 'rules'];

function asOpenAI(origin, { body }) {
  const split = (own) =>
    python(record(pairs(body).filter(([key]) => OWN_FIELDS.includes(key) === own)));
  const [method, text] = body.messages ? ['chat.completions', 'message.content']
    : ['completions', 'text'];
  return 'import os\n\nimport openai\n\n' +
    `client = openai.OpenAI(base_url=${python(`${origin}/v1`)}, api_key=${KEY})\n` +
    `asked = ${split(false)}\nextra = ${split(true)}\n` +
    `answer = client.${method}.create(**asked, extra_body=extra)\n` +
    `print(answer.choices[0].${text})\n`;
}

const COPIES = { curl: asCurl, Python: asClient, openai: asOpenAI };
