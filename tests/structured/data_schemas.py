"""Schemas of data to extract or to write, each modelled on a kind of public project and written anew."""

from __future__ import annotations

from .case import Case

DATA = [
    # an accounting program's reader of German invoices
    Case(
        "rechnung",
        "Rechnung 2024-0117 vom 3. Mai: zwei Stühle zu je 89,50 Euro, zahlbar per Überweisung.",
        r"""{"type": "object", "properties": {
        "Rechnungsnummer": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{4}$"},
        "Datum": {"type": "string", "format": "date"},
        "Empfänger": {"type": "object", "properties": {"Name": {"type": "string"}, "Straße": {"type": "string"},
            "PLZ": {"type": "string", "pattern": "^[0-9]{5}$"}, "Ort": {"type": "string"}}, "required": ["Name"]},
        "Positionen": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "object", "properties": {
            "Bezeichnung": {"type": "string"}, "Menge": {"type": "integer", "minimum": 1, "maximum": 999},
            "Einzelpreis": {"type": "number", "minimum": 0, "maximum": 99999, "multipleOf": 0.01},
            "Steuersatz": {"enum": [0, 7, 19]}}, "required": ["Bezeichnung", "Menge", "Einzelpreis"]}},
        "Zahlungsart": {"enum": ["Überweisung", "Lastschrift", "Bar", "Kreditkarte"]},
        "Fällig in Tagen": {"type": ["integer", "null"], "minimum": 0, "maximum": 120}},
        "required": ["Rechnungsnummer", "Datum", "Positionen", "Zahlungsart"]}""",
    ),
    # a hospital data standard's observation
    Case(
        "observation",
        "Blood pressure of the patient today: 128 systolic, slightly high.",
        r"""{"type": "object", "properties": {
        "resourceType": {"const": "Observation"},
        "status": {"enum": ["registered", "preliminary", "final", "amended"]},
        "code": {"type": "object", "properties": {"coding": {"type": "array", "minItems": 1, "maxItems": 2,
            "items": {"type": "object", "properties": {"system": {"type": "string", "format": "uri"},
            "code": {"type": "string", "pattern": "^[0-9]{1,5}-[0-9]$"}, "display": {"type": "string"}},
            "required": ["code", "display"], "additionalProperties": false}}, "text": {"type": "string"}},
            "required": ["coding"], "additionalProperties": false},
        "effectiveDateTime": {"type": "string", "format": "date-time"},
        "valueQuantity": {"type": "object", "properties": {"value": {"type": "number", "minimum": 0, "maximum": 500},
            "unit": {"enum": ["mm[Hg]", "kg", "cm", "Cel", "/min", "µmol/L"]}}, "required": ["value", "unit"],
            "additionalProperties": false},
        "interpretation": {"enum": ["L", "N", "H", null]}},
        "required": ["resourceType", "status", "code", "valueQuantity", "interpretation"],
        "additionalProperties": false}""",
    ),
    # a recruiting program's reader of CVs
    Case(
        "resume",
        "Extract: Maya Singh, maya@example.com, studied physics in Leeds until 2018, engineer at Volta since 2019.",
        r"""{"type": "object", "properties": {
        "name": {"type": "string"}, "email": {"type": "string", "format": "email"},
        "links": {"type": "array", "items": {"type": "string", "format": "uri"}, "maxItems": 2},
        "education": {"type": "array", "maxItems": 3, "items": {"type": "object", "properties": {
            "school": {"type": "string"}, "degree": {"enum": ["none", "bachelor", "master", "doctor"]},
            "year": {"type": "integer", "minimum": 1950, "maximum": 2030}}, "required": ["school", "degree"]}},
        "jobs": {"type": "array", "maxItems": 3, "items": {"type": "object", "properties": {
            "employer": {"type": "string"}, "title": {"type": "string"},
            "from": {"type": "string", "pattern": "^(19|20)[0-9]{2}-(0[1-9]|1[0-2])$"},
            "to": {"type": ["string", "null"], "pattern": "^(19|20)[0-9]{2}-(0[1-9]|1[0-2])$"}},
            "required": ["employer", "title", "from", "to"]}},
        "skills": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
        "required": ["name", "education", "jobs", "skills"]}""",
    ),
    # a graph-building pipeline for retrieval: entities and relations of fixed kinds
    Case(
        "knowledge_graph",
        "Marie Curie worked in Paris and won the Nobel Prize in 1903.",
        r"""{"type": "object", "properties": {
        "nodes": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "string"},
            "type": {"enum": ["Person", "Place", "Organisation", "Award", "Work"]}}, "required": ["id", "type"],
            "additionalProperties": false}},
        "edges": {"type": "array", "items": {"type": "object", "properties": {"from": {"type": "string"},
            "relation": {"type": "string", "pattern": "^[A-Z]+(_[A-Z]+)*$"}, "to": {"type": "string"},
            "year": {"type": "integer"}}, "required": ["from", "relation", "to"], "additionalProperties": false}}},
        "required": ["nodes", "edges"], "additionalProperties": false}""",
    ),
    # a tutor that shows its steps
    Case(
        "solution",
        "Solve 8x + 7 = -23 step by step.",
        r"""{"type": "object", "properties": {
        "steps": {"type": "array", "items": {"type": "object", "properties": {"explanation": {"type": "string"},
            "result": {"type": "string"}}, "required": ["explanation", "result"], "additionalProperties": false}},
        "answer": {"type": "string"}}, "required": ["steps", "answer"], "additionalProperties": false}""",
    ),
    # a generator of user interfaces: components that hold components
    Case(
        "ui_tree",
        "A form with a name field and a send button.",
        r"""{"$ref": "#/$defs/component", "$defs": {"component": {"type": "object", "properties": {
        "type": {"enum": ["form", "row", "field", "button", "text"]},
        "label": {"type": "string"},
        "attributes": {"type": "array", "items": {"type": "object", "properties": {
            "name": {"enum": ["id", "class", "placeholder", "onclick"]}, "value": {"type": "string"}},
            "required": ["name", "value"], "additionalProperties": false}},
        "children": {"type": "array", "items": {"$ref": "#/$defs/component"}}},
        "required": ["type", "label", "attributes", "children"], "additionalProperties": false}}}""",
    ),
    # a forum's export: answers nest without a limit
    Case(
        "comment_thread",
        "A short discussion about cats: Ann asks, Ben answers.",
        r"""{"$ref": "#/definitions/comment", "definitions": {"comment": {"type": "object", "properties": {
        "author": {"type": "string", "minLength": 1, "maxLength": 30}, "text": {"type": "string"},
        "likes": {"type": "integer", "minimum": 0}, "at": {"type": "string", "format": "date-time"},
        "replies": {"type": "array", "items": {"$ref": "#/definitions/comment"}}},
        "required": ["author", "text", "replies"]}}}""",
    ),
    # a formula parser's syntax tree
    Case(
        "expression",
        "Give 3 * (x + 2) as a tree.",
        r"""{"$ref": "#/$defs/expression", "$defs": {"expression": {"anyOf": [
        {"type": "number"}, {"type": "string", "pattern": "^[a-z]$"}, {"$ref": "#/$defs/operation"}]},
        "operation": {"type": "object", "properties": {"op": {"enum": ["+", "-", "*", "/", "^"]},
            "left": {"$ref": "#/$defs/expression"}, "right": {"$ref": "#/$defs/expression"}},
            "required": ["op", "left", "right"], "additionalProperties": false}}}""",
    ),
    # a scaffolding tool: files and folders told apart by a constant
    Case(
        "file_tree",
        "Lay out a small Python package with tests.",
        r"""{"type": "object", "properties": {"root": {"$ref": "#/$defs/folder"}}, "required": ["root"],
        "additionalProperties": false, "$defs": {
        "folder": {"type": "object", "properties": {"kind": {"const": "folder"},
            "name": {"type": "string", "pattern": "^[a-z_]{1,16}$"}, "entries": {"type": "array", "maxItems": 4,
            "items": {"anyOf": [{"$ref": "#/$defs/file"}, {"$ref": "#/$defs/folder"}]}}},
            "required": ["kind", "name", "entries"], "additionalProperties": false},
        "file": {"type": "object", "properties": {"kind": {"const": "file"},
            "name": {"type": "string", "pattern": "^[a-z_]{1,16}\\.(py|md|toml)$"},
            "bytes": {"type": "integer", "minimum": 0, "maximum": 1000000}}, "required": ["kind", "name"],
            "additionalProperties": false}}}""",
    ),
    # a planner whose steps are a chain that ends in null
    Case(
        "chain_of_tasks",
        "Plan the steps to bake bread.",
        r"""{"$ref": "#/$defs/task", "$defs": {"task": {"type": "object", "properties": {
        "do": {"type": "string"}, "minutes": {"type": "integer", "minimum": 1, "maximum": 600},
        "next": {"anyOf": [{"$ref": "#/$defs/task"}, {"type": "null"}]}}, "required": ["do", "minutes", "next"],
        "additionalProperties": false}}}""",
    ),
    # a shop's analysis of Arabic reviews
    Case(
        "review_arabic",
        "الجهاز ممتاز لكن البطارية ضعيفة.",
        r"""{"type": "object", "properties": {
        "المنتج": {"type": "string", "maxLength": 60}, "الرأي": {"enum": ["إيجابي", "سلبي", "محايد"]},
        "التقييم": {"type": "integer", "minimum": 1, "maximum": 5},
        "المزايا": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 3},
        "ملاحظة": {"type": ["string", "null"], "maxLength": 80}},
        "required": ["المنتج", "الرأي", "التقييم"], "additionalProperties": false}""",
    ),
    # a translation memory in Japanese
    Case(
        "translation_japanese",
        "「おはようございます」を英語に訳してください。",
        r"""{"type": "object", "properties": {
        "原文": {"type": "string", "maxLength": 80}, "訳文": {"type": "string"},
        "言語": {"enum": ["英語", "日本語", "中国語", "한국어"]}, "丁寧さ": {"enum": [1, 2, 3]},
        "用語": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 20}, "maxProperties": 2}},
        "required": ["原文", "訳文", "言語"], "additionalProperties": false}""",
    ),
    # a diary app's mood entry, whose values are emoji
    Case(
        "mood",
        "Today I hiked in the rain and felt great.",
        r"""{"type": "object", "properties": {"😀": {"enum": ["🎉", "🙂", "😐", "😢", "👩‍👩‍👧", "🇯🇵"]},
        "weather": {"const": "🌧️"}, "energy ⚡": {"type": "number", "minimum": 0, "maximum": 1},
        "tags": {"type": "array", "maxItems": 3, "items": {"type": "string",
            "pattern": "^#[\\u00e0-\\u00ffa-z]{1,12}$"}}},
        "required": ["😀", "weather", "energy ⚡", "tags"], "additionalProperties": false}""",
    ),
    # a cooking site's structured data
    Case(
        "recipe",
        "Pancakes for four: flour, milk, eggs; 20 minutes.",
        r"""{"type": "object", "properties": {
        "@type": {"const": "Recipe"}, "name": {"type": "string"}, "prepTime": {"type": "string", "format": "duration"},
        "recipeYield": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]},
        "recipeIngredient": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "recipeInstructions": {"type": "array", "minItems": 1, "items": {"type": "object", "properties": {
            "@type": {"const": "HowToStep"}, "text": {"type": "string"}}, "required": ["@type", "text"]}},
        "suitableForDiet": {"type": "array", "items": {"enum": ["VeganDiet", "GlutenFreeDiet", "HalalDiet"]}}},
        "required": ["@type", "name", "recipeIngredient", "recipeInstructions"]}""",
    ),
    # an address book whose entries are composed of parts
    Case(
        "contact",
        "Save Jo Park, 12 Mill Lane, Oxford, phone +44 1865 123456.",
        r"""{"allOf": [{"$ref": "#/$defs/person"}, {"$ref": "#/$defs/address"},
        {"type": "object", "properties": {"favourite": {"type": "boolean"}}, "required": ["favourite"]}],
        "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"},
            "phone": {"type": "string", "pattern": "^\\+[0-9 ]{7,17}$"}}, "required": ["name", "phone"]},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"},
            "country": {"type": "string", "pattern": "^[A-Z]{2}$"}}, "required": ["street", "city"]}}}""",
    ),
    # a payroll system's wide, flat record
    Case(
        "employee",
        "Add Lena Fox, accountant in Graz, 38 hours a week, since 1 March 2021.",
        r"""{"type": "object", "properties": {
        "id": {"type": "integer", "minimum": 1, "maximum": 99999}, "first_name": {"type": "string", "maxLength": 30},
        "middle_name": {"type": "string", "maxLength": 30}, "last_name": {"type": "string", "maxLength": 30},
        "title": {"enum": ["Mr", "Ms", "Dr", ""]}, "birth_date": {"type": "string", "format": "date"},
        "nationality": {"type": "string", "pattern": "^[A-Z]{3}$"}, "gender": {"enum": ["f", "m", "x", null]},
        "email": {"type": "string", "format": "email"}, "phone": {"type": "string", "maxLength": 20},
        "street": {"type": "string", "maxLength": 40}, "number": {"type": "string", "maxLength": 6},
        "postcode": {"type": "string", "pattern": "^[0-9]{4,5}$"}, "city": {"type": "string", "maxLength": 30},
        "country": {"enum": ["AT", "CH", "DE"]}, "position": {"type": "string"}, "department": {"type": "string"},
        "manager_id": {"type": ["integer", "null"], "minimum": 1, "maximum": 99999},
        "start": {"type": "string", "format": "date"},
        "end": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "hours": {"type": "number", "minimum": 0, "maximum": 60, "multipleOf": 0.25},
        "salary": {"type": "integer", "minimum": 0, "maximum": 1000000, "multipleOf": 10},
        "currency": {"const": "EUR"}, "grade": {"enum": [1, 2, 3, "E1", "E2"]}, "remote": {"type": "boolean"},
        "office": {"type": "string", "maxLength": 20}, "desk": {"type": "string", "pattern": "^[A-F][0-9]{2}$"},
        "vacation_days": {"type": "integer", "minimum": 20, "maximum": 40}, "works_council": {"type": "boolean"},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "languages": {"type": "array", "items": {"enum": ["de", "en", "fr", "it"]}, "maxItems": 4},
        "emergency_contact": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 40},
            "phone": {"type": "string", "maxLength": 20}}, "required": ["name"]}, "notes": {"type": "string"}},
        "required": ["id", "first_name", "last_name", "email", "country", "position", "start", "hours", "currency"],
        "additionalProperties": false}""",
    ),
    # a service mesh's configuration: settings seven levels down
    Case(
        "deep_config",
        "Give api three retries with a delay of 200 ms.",
        r"""{"type": "object", "properties": {"mesh": {"type": "object", "properties": {"services": {"type": "object",
        "properties": {"api": {"type": "object", "properties": {"routes": {"type": "array", "minItems": 1,
        "maxItems": 2, "items": {"type": "object", "properties": {"match": {"type": "object", "properties": {
        "prefix": {"type": "string", "pattern": "^/[a-z]{0,10}$"}}, "required": ["prefix"]}, "retry": {
        "type": "object", "properties": {"attempts": {"type": "integer", "minimum": 0, "maximum": 10},
        "backoff": {"type": "object", "properties": {"base_ms": {"type": "integer", "minimum": 1, "maximum": 60000},
        "jitter": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["base_ms"]}},
        "required": ["attempts", "backoff"]}}, "required": ["match", "retry"]}}}, "required": ["routes"]}},
        "required": ["api"]}}, "required": ["services"]}}, "required": ["mesh"]}""",
    ),
    # a feature-flag service: a map from names to settings
    Case(
        "feature_flags",
        "Switch dark_mode on for everyone and new_cart for 20 percent.",
        r"""{"type": "object", "minProperties": 1, "maxProperties": 3, "additionalProperties": {"type": "object",
        "properties": {"enabled": {"type": "boolean"}, "percent": {"type": "number", "minimum": 0, "maximum": 100},
        "owner": {"type": ["string", "null"], "maxLength": 30}}, "required": ["enabled"],
        "additionalProperties": false}}""",
    ),
    # a log analyser whose levels are of mixed types
    Case(
        "log_entry",
        "Classify: 12:01:07 worker 3 lost its connection, retrying.",
        r"""{"type": "object", "properties": {"level": {"enum": [0, 10, "debug", "info", 2.5, true, false, null]},
        "component": {"type": "string", "maxLength": 30}, "time": {"type": "string", "format": "time"},
        "code": {"const": null}, "detail": {}}, "required": ["level", "component", "code"],
        "additionalProperties": false}""",
    ),
    # a retrieval chain's grader
    Case(
        "grade",
        "Is a text about volcanoes relevant to the question of how lava forms?",
        r"""{"title": "GradeDocuments", "description": "Relevance of a document", "type": "object", "properties":
        {"binary_score": {"type": "string", "enum": ["yes", "no"]}}, "required": ["binary_score"]}""",
    ),
    # a supervisor that hands work to agents
    Case(
        "route",
        "Who should look up the price of copper?",
        r"""{"type": "object", "properties": {"reason": {"type": "string"}, "next": {"anyOf": [{"enum": ["FINISH"]},
        {"enum": ["researcher", "coder", "critic"]}]}}, "required": ["reason", "next"],
        "additionalProperties": false}""",
    ),
    # a telemetry gateway: readings as tuples, a calibration matrix
    Case(
        "sensor_batch",
        "Two readings of the greenhouse thermometer: 21.5 and 22 degrees.",
        r"""{"type": "object", "properties": {
        "sensor": {"type": "string", "pattern": "^[0-9A-F]{2}(:[0-9A-F]{2}){5}$"},
        "readings": {"type": "array", "minItems": 1, "maxItems": 4, "items": {"type": "array", "prefixItems": [
            {"type": "integer", "minimum": 1600000000, "maximum": 1800000000}, {"type": "number", "minimum": -40,
            "exclusiveMaximum": 125}, {"enum": ["ok", "low battery", null]}], "items": false, "minItems": 3}},
        "calibration": {"type": "array", "minItems": 3, "maxItems": 3, "items": {"type": "array", "minItems": 3,
            "maxItems": 3, "items": {"type": "number", "minimum": -1, "maximum": 1}}}},
        "required": ["sensor", "readings", "calibration"], "additionalProperties": false}""",
    ),
    # a web server's access event: formats of every kind
    Case(
        "access_event",
        "One visit from 203.0.113.9 to the start page.",
        r"""{"type": "object", "properties": {
        "event_id": {"type": "string", "format": "uuid"}, "client": {"type": "string", "format": "ipv4"},
        "client6": {"anyOf": [{"type": "string", "format": "ipv6"}, {"type": "null"}]},
        "host": {"type": "string", "format": "hostname"}, "url": {"type": "string", "format": "uri", "maxLength": 80},
        "day": {"type": "string", "format": "date"}, "at": {"type": "string", "format": "time"},
        "took": {"type": "string", "format": "duration"}, "user": {"type": "string", "format": "email"},
        "status": {"type": "integer", "minimum": 100, "exclusiveMaximum": 600}},
        "required": ["event_id", "client", "host", "url", "day", "at", "status"], "additionalProperties": false}""",
    ),
]
