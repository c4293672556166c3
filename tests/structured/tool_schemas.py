"""Parameters of tools as agents define them, each modelled on a kind of public project and written anew."""

from __future__ import annotations

from .case import Case

TOOLS = [
    # a coding agent's editor: several replacements in one file, and a dry run
    Case(
        "edit_file",
        "Rename the function load to read_config in src/app.py.",
        r"""{"type": "object", "properties": {
        "path": {"type": "string", "description": "Path relative to the workspace", "minLength": 1},
        "edits": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
            "old_text": {"type": "string", "description": "Text to look for, exactly"},
            "new_text": {"type": "string"},
            "replace_all": {"type": "boolean", "default": false}},
            "required": ["old_text", "new_text"], "additionalProperties": false}},
        "dry_run": {"type": "boolean", "default": false}},
        "required": ["path", "edits"], "additionalProperties": false}""",
    ),
    # a coding agent's search over a source tree, a wrapper of a line-oriented search program
    Case(
        "search_code",
        "Find every TODO in the Python files.",
        r"""{"type": "object", "properties": {
        "pattern": {"type": "string", "description": "A regular expression"},
        "path": {"type": ["string", "null"], "default": null},
        "glob": {"type": "string", "pattern": "^[*a-z0-9_./]{1,24}$"},
        "output": {"enum": ["content", "files", "count"], "default": "files"},
        "context_lines": {"type": "integer", "minimum": 0, "maximum": 20},
        "ignore_case": {"type": "boolean"},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 500}},
        "required": ["pattern", "output"]}""",
    ),
    # a sandbox that runs commands: argument vector, environment by name pattern, a timeout in steps
    Case(
        "run_command",
        "Run the unit tests with verbose output; stop after a minute.",
        r"""{"type": "object", "properties": {
        "argv": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 6},
        "timeout_ms": {"type": "integer", "minimum": 100, "maximum": 120000, "multipleOf": 100},
        "env": {"type": "object", "patternProperties": {"^[A-Z][A-Z0-9_]{0,15}$": {"type": "string", "maxLength": 30}},
            "additionalProperties": false, "maxProperties": 3},
        "stdin": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["argv", "timeout_ms"]}""",
    ),
    # a browser agent: a short plan of actions, told apart by a constant
    Case(
        "browser_actions",
        "Open example.org, scroll down and press the sign-up button.",
        r"""{"type": "object", "properties": {
        "thought": {"type": "string"},
        "actions": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"anyOf": [
            {"type": "object", "properties": {"action": {"const": "go_to"}, "url": {"type": "string", "format": "uri"},
                "new_tab": {"type": "boolean"}}, "required": ["action", "url"], "additionalProperties": false},
            {"type": "object", "properties": {"action": {"const": "click"}, "index": {"type": "integer", "minimum": 0}},
                "required": ["action", "index"], "additionalProperties": false},
            {"type": "object", "properties": {"action": {"const": "type"}, "index": {"type": "integer", "minimum": 0},
                "text": {"type": "string"}}, "required": ["action", "index", "text"], "additionalProperties": false},
            {"type": "object", "properties": {"action": {"const": "scroll"}, "down": {"type": "boolean"},
                "pages": {"type": "number", "exclusiveMinimum": 0, "maximum": 10}},
                "required": ["action", "down"], "additionalProperties": false}]}}},
        "required": ["thought", "actions"], "additionalProperties": false}""",
    ),
    # a calendar connector: a timed or a whole-day event, attendees, a recurrence rule taken apart
    Case(
        "create_event",
        "Plan a weekly stand-up on Monday at 9:30 in Berlin with ana@example.org.",
        r"""{"type": "object", "properties": {
        "summary": {"type": "string"},
        "start": {"anyOf": [
            {"type": "object", "properties": {"date_time": {"type": "string", "format": "date-time"},
                "time_zone": {"type": "string"}}, "required": ["date_time"], "additionalProperties": false},
            {"type": "object", "properties": {"date": {"type": "string", "format": "date"}}, "required": ["date"],
                "additionalProperties": false}]},
        "duration_minutes": {"type": "integer", "minimum": 5, "maximum": 1440, "multipleOf": 5},
        "attendees": {"type": "array", "maxItems": 4, "items": {"type": "object", "properties": {
            "email": {"type": "string", "format": "email"}, "optional": {"type": "boolean", "default": false}},
            "required": ["email"], "additionalProperties": false}},
        "recurrence": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {
            "frequency": {"enum": ["daily", "weekly", "monthly", "yearly"]},
            "interval": {"type": "integer", "minimum": 1, "maximum": 99},
            "by_day": {"type": "array", "items": {"enum": ["MO", "TU", "WE", "TH", "FR", "SA", "SU"]}, "maxItems": 7},
            "until": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}},
            "required": ["frequency", "interval"], "additionalProperties": false}]}},
        "required": ["summary", "start", "duration_minutes", "recurrence"], "additionalProperties": false}""",
    ),
    # a mail connector: lists of addresses, a body of free text, importance as one of three numbers
    Case(
        "send_email",
        "Write to the team at team@example.com that the office is closed on Friday.",
        r"""{"type": "object", "properties": {
        "to": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1, "maxItems": 3},
        "cc": {"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 3},
        "subject": {"type": "string", "maxLength": 78},
        "body": {"type": "string", "description": "Plain text"},
        "importance": {"enum": [1, 3, 5]},
        "send_at": {"type": ["string", "null"], "format": "date-time"}},
        "required": ["to", "subject", "body"]}""",
    ),
    # a text-to-SQL tool that asks for a query's parts: conditions nest
    Case(
        "query_table",
        "Which customers from Austria spent more than 1000 last year, or are marked as vip?",
        r"""{"type": "object", "properties": {
        "table": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,20}$"},
        "columns": {"type": "array", "items": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,20}$"}, "minItems": 1,
            "maxItems": 8},
        "where": {"$ref": "#/$defs/condition"},
        "order_by": {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {
            "column": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,20}$"}, "descending": {"type": "boolean"}},
            "required": ["column"]}},
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000}},
        "required": ["table", "columns", "where", "limit"],
        "$defs": {"condition": {"anyOf": [
            {"type": "object", "properties": {
                "column": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,20}$"},
                "operator": {"enum": ["=", "<>", "<", "<=", ">", ">=", "like", "is null"]},
                "value": {"type": ["string", "number", "boolean", "null"]}},
                "required": ["column", "operator", "value"], "additionalProperties": false},
            {"type": "object", "properties": {
                "all": {"type": "array", "items": {"$ref": "#/$defs/condition"}, "minItems": 2, "maxItems": 3}},
                "required": ["all"], "additionalProperties": false},
            {"type": "object", "properties": {
                "any": {"type": "array", "items": {"$ref": "#/$defs/condition"}, "minItems": 2, "maxItems": 3}},
                "required": ["any"], "additionalProperties": false}]}}}""",
    ),
    # a cluster operator's tool: names and quantities by pattern, labels as a map, ports in their range
    Case(
        "create_deployment",
        "Deploy nginx 1.27 with three replicas and 256 MB of memory each, labelled tier=web.",
        r"""{"type": "object", "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$"},
        "namespace": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$", "default": "default"},
        "replicas": {"type": "integer", "minimum": 0, "maximum": 50},
        "labels": {"type": "object", "maxProperties": 4,
            "patternProperties": {"^[a-z]([a-z.-]{0,15}[a-z])?$": {"type": "string", "pattern": "^[A-Za-z0-9]{1,20}$"}},
            "additionalProperties": false},
        "containers": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "object", "properties": {
            "image": {"type": "string", "pattern": "^[a-z0-9/]{1,30}:[a-z0-9.]{1,10}$"},
            "ports": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}, "maxItems": 3},
            "resources": {"type": "object", "properties": {
                "cpu": {"type": "string", "pattern": "^[1-9][0-9]{0,3}m$"},
                "memory": {"type": "string", "pattern": "^[1-9][0-9]{0,3}(Ki|Mi|Gi)$"}}, "required": ["memory"]},
            "pull_policy": {"enum": ["Always", "IfNotPresent", "Never"]}},
            "required": ["image", "resources"]}}},
        "required": ["name", "replicas", "containers"]}""",
    ),
    # an issue tracker's connector: labels of a fixed set, a priority that may be null, estimates in halves
    Case(
        "create_issue",
        "File a bug: the login page shows a blank screen in Firefox. It is urgent.",
        r"""{"type": "object", "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 256},
        "body": {"type": "string"},
        "labels": {"type": "array", "items": {"enum": ["bug", "feature", "docs", "good first issue"]}, "maxItems": 3},
        "priority": {"enum": [0, 1, 2, 3, null]},
        "estimate_days": {"type": "number", "minimum": 0.5, "maximum": 30, "multipleOf": 0.5},
        "due": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "blocked_by": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2,5}-[1-9][0-9]{0,4}$"},
            "maxItems": 3}},
        "required": ["title", "body", "priority"], "additionalProperties": false}""",
    ),
    # a payment provider's API: an amount in cents' steps, a source that is one of three kinds
    Case(
        "create_payment",
        "Charge 49.90 euros to the card for order 1881.",
        r"""{"type": "object", "properties": {
        "amount": {"type": "number", "exclusiveMinimum": 0, "maximum": 10000, "multipleOf": 0.01},
        "currency": {"enum": ["EUR", "USD", "CHF", "GBP"]},
        "source": {"oneOf": [
            {"type": "object", "properties": {"kind": {"const": "card"},
                "number": {"type": "string", "pattern": "^[0-9]{12,19}$"},
                "expires": {"type": "string", "pattern": "^(0[1-9]|1[0-2])/[0-9]{2}$"}},
                "required": ["kind", "number", "expires"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "sepa"},
                "iban": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$"}},
                "required": ["kind", "iban"], "additionalProperties": false},
            {"type": "object", "properties": {"kind": {"const": "wallet"}, "id": {"type": "string", "format": "uuid"}},
                "required": ["kind", "id"], "additionalProperties": false}]},
        "description": {"type": "string"},
        "idempotency_key": {"type": "string", "format": "uuid"}},
        "required": ["amount", "currency", "source", "idempotency_key"], "additionalProperties": false}""",
    ),
    # a map service: geometries with fixed-length positions within the globe
    Case(
        "find_features",
        "Which cafes lie within 500 m of the cathedral in Cologne?",
        r"""{"type": "object", "properties": {
        "category": {"type": "string"},
        "geometry": {"anyOf": [
            {"type": "object", "properties": {"type": {"const": "Point"}, "coordinates": {"$ref": "#/$defs/position"}},
                "required": ["type", "coordinates"], "additionalProperties": false},
            {"type": "object", "properties": {"type": {"const": "LineString"}, "coordinates": {"type": "array",
                "items": {"$ref": "#/$defs/position"}, "minItems": 2, "maxItems": 5}},
                "required": ["type", "coordinates"], "additionalProperties": false},
            {"type": "object", "properties": {"type": {"const": "Polygon"}, "coordinates": {"type": "array",
                "minItems": 1, "maxItems": 1, "items": {"type": "array", "items": {"$ref": "#/$defs/position"},
                "minItems": 4, "maxItems": 6}}}, "required": ["type", "coordinates"], "additionalProperties": false}]},
        "buffer_m": {"type": "integer", "minimum": 0, "maximum": 50000}},
        "required": ["category", "geometry"], "additionalProperties": false,
        "$defs": {"position": {"type": "array", "prefixItems": [
            {"type": "number", "minimum": -180, "maximum": 180}, {"type": "number", "minimum": -90, "maximum": 90}],
            "items": false, "minItems": 2}}}""",
    ),
    # an assistant that books restaurants
    Case(
        "book_table",
        "Book a table for four at Trattoria Roma on 14 June 2025 at 7 pm, outside if possible.",
        r"""{"type": "object", "properties": {
        "restaurant": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        "guests": {"type": "integer", "minimum": 1, "maximum": 20},
        "seating": {"enum": ["indoor", "outdoor", "bar", null]},
        "phone": {"type": "string", "pattern": "^\\+[1-9]\\d{6,14}$"},
        "notes": {"type": "string"}},
        "required": ["restaurant", "date", "time", "guests"], "additionalProperties": false}""",
    ),
    # a home automation hub: entity names by pattern, colours as exactly three bytes
    Case(
        "set_light",
        "Make the kitchen lamp warm orange at half brightness, slowly.",
        r"""{"type": "object", "properties": {
        "entity_id": {"type": "string", "pattern": "^(light|switch)\\.[a-z0-9_]{1,24}$"},
        "state": {"enum": ["on", "off"]},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 255},
        "rgb": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}, "minItems": 3,
            "maxItems": 3},
        "transition_s": {"type": "number", "minimum": 0, "exclusiveMaximum": 60}},
        "required": ["entity_id", "state", "rgb"], "additionalProperties": false}""",
    ),
    # a firewall manager: addresses and hosts by format
    Case(
        "add_firewall_rule",
        "Allow SSH from 10.0.0.7 to the build server for two hours.",
        r"""{"type": "object", "properties": {
        "id": {"type": "string", "format": "uuid"},
        "source": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]},
        "host": {"type": "string", "format": "hostname"},
        "ports": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": [
            {"type": "integer", "minimum": 1, "maximum": 65535},
            {"type": "string", "pattern": "^[1-9][0-9]{1,3}-[1-9][0-9]{1,3}$"}]}},
        "protocol": {"enum": ["tcp", "udp", "icmp"]},
        "expires_after": {"type": "string", "format": "duration"},
        "allow": {"type": "boolean"}},
        "required": ["id", "source", "host", "ports", "protocol", "allow"], "additionalProperties": false}""",
    ),
    # a document store that takes patches: a top-level array of operations, values of any scalar kind
    Case(
        "patch_document",
        "Set the status to paid and remove the draft flag.",
        r"""{"type": "array", "minItems": 1, "maxItems": 4, "items": {"anyOf": [
        {"type": "object", "properties": {"op": {"enum": ["add", "replace", "test"]},
            "path": {"type": "string", "pattern": "^(/[a-z0-9_]{1,12}){1,3}$"},
            "value": {"type": ["string", "number", "boolean", "null"]}},
            "required": ["op", "path", "value"], "additionalProperties": false},
        {"type": "object", "properties": {"op": {"const": "remove"},
            "path": {"type": "string", "pattern": "^(/[a-z0-9_]{1,12}){1,3}$"}},
            "required": ["op", "path"], "additionalProperties": false}]}}""",
    ),
    # a tool that needs no arguments
    Case(
        "who_am_i",
        "Who is logged in?",
        r"""{"type": "object", "properties": {}, "additionalProperties": false}""",
    ),
    # a vector store's retriever: a map of filters whose values are scalars or lists
    Case(
        "search_documents",
        "Find five papers by Curie about radium from after 1900.",
        r"""{"type": "object", "properties": {
        "query": {"type": "string", "description": "What to look for, in words"},
        "top_k": {"type": "integer", "minimum": 1, "maximum": 100, "default": 5},
        "min_score": {"type": "number", "minimum": 0, "maximum": 1},
        "filters": {"type": "object", "maxProperties": 3, "additionalProperties": {"anyOf": [
            {"type": "string", "maxLength": 40}, {"type": "number"}, {"type": "boolean"},
            {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3}]}}},
        "required": ["query", "top_k"], "additionalProperties": false}""",
    ),
    # a team chat's connector: a message of blocks, some of which hold others
    Case(
        "post_message",
        "Announce version 2.0 in the general channel, with a link to the notes.",
        r"""{"type": "object", "properties": {
        "channel": {"type": "string", "pattern": "^#[a-z0-9-]{1,21}$"},
        "blocks": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": [
            {"type": "object", "properties": {"type": {"const": "header"},
                "text": {"type": "string", "maxLength": 150}}, "required": ["type", "text"]},
            {"type": "object", "properties": {"type": {"const": "section"}, "markdown": {"type": "string"},
                "fields": {"type": "array", "items": {"type": "string", "maxLength": 60}, "maxItems": 3}},
                "required": ["type", "markdown"]},
            {"type": "object", "properties": {"type": {"const": "divider"}}, "required": ["type"]},
            {"type": "object", "properties": {"type": {"const": "actions"}, "buttons": {"type": "array", "minItems": 1,
                "maxItems": 2, "items": {"type": "object", "properties": {"label": {"type": "string", "maxLength": 30},
                "url": {"type": "string", "format": "uri"}, "style": {"enum": ["primary", "danger"]}},
                "required": ["label"]}}}, "required": ["type", "buttons"]}]}},
        "thread_ts": {"type": ["string", "null"], "pattern": "^\\d{10}\\.\\d{6}$"}},
        "required": ["channel", "blocks"]}""",
    ),
    # a plotting tool: a mark given by name or in full, channels that extend one definition
    Case(
        "draw_chart",
        "Draw monthly revenue per region as bars.",
        r"""{"type": "object", "properties": {
        "mark": {"anyOf": [{"enum": ["bar", "line", "point", "area"]},
            {"type": "object", "properties": {"type": {"enum": ["bar", "line", "point", "area"]},
            "opacity": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["type"]}]},
        "encoding": {"type": "object", "properties": {
            "x": {"$ref": "#/$defs/channel"}, "y": {"$ref": "#/$defs/channel"},
            "color": {"anyOf": [{"$ref": "#/$defs/channel"}, {"type": "null"}]}}, "required": ["x", "y"]},
        "width": {"type": "integer", "minimum": 100, "maximum": 2000, "multipleOf": 50}},
        "required": ["mark", "encoding"],
        "$defs": {"channel": {"type": "object", "properties": {
            "field": {"type": "string", "maxLength": 40},
            "type": {"enum": ["quantitative", "temporal", "ordinal", "nominal"]},
            "aggregate": {"enum": ["sum", "mean", "count", null]}}, "required": ["field", "type"]}}}""",
    ),
]
